"""Run `split_attention` and torch's attention on the same tensors, on a CPU by Triton's interpreter in its own process.

    TRITON_INTERPRET=1 python -m support.split_attention cpu

prints the largest difference for each case.
"""

import json
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.models.kernels.cuda_attention import COLUMNS, split_attention

# Query heads, key-value heads, rows, columns, head size: partial splits and blocks, several blocks of rows.
CASES = ((9, 3, 1, 5, 64), (9, 3, 13, 200, 64), (8, 8, 5, 129, 96), (32, 1, 5, 260, 128), (6, 2, 1, 128, 32))


def differences(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Compare with a random mask, and a single row without a mask too: max |ours - torch's| of each case.

    A block of columns that no row sees holds NaN for ours, as it must not be read.
    """
    torch.manual_seed(0)
    found = []
    for heads, kv_heads, rows, columns, head_size in CASES:
        query = torch.randn(1, rows, heads, head_size, device=device, dtype=dtype).transpose(1, 2)
        # Views of a longer cache, as in a session; columns beyond them must not count.
        key, value = torch.randn(2, 1, kv_heads, columns + 40, head_size, device=device, dtype=dtype)
        key, value = (part[:, :, :columns] for part in (key, value))
        mask = torch.zeros(1, 1, rows, columns, device=device, dtype=dtype)
        mask.masked_fill_(torch.rand(rows, columns, device=device) < 0.5, torch.finfo(dtype).min)
        mask[..., 0] = 0
        hidden = slice(COLUMNS, 2 * COLUMNS) if rows > 1 else slice(0)
        mask[..., hidden] = torch.finfo(dtype).min
        for given in (mask,) if rows > 1 else (mask, None):
            with torch.no_grad():
                theirs = scaled_dot_product_attention(query, key, value, given, enable_gqa=True)
                for part in (key, value):
                    part[:, :, hidden] = torch.nan
                ours = split_attention(query, key, value, given, head_size**-0.5).transpose(1, 2)
            found.append(float((ours.float() - theirs.float()).abs().max()))
    return found


if __name__ == "__main__":
    print(json.dumps(differences(torch.device(sys.argv[1]), torch.float32)))
