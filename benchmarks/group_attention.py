"""`folded` against `dense` group attention: time of forward + backward, and memory of the mask that is not made.

    OMP_NUM_THREADS=2 python benchmarks/group_attention.py [--json FILE]

The two backends take turns; the ratio is the median over turns, so that another job on the machine slows both.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from parts.timing import Work, in_turns
from torch import Tensor

from draftsmith.models.groups.attention import group_attention
from draftsmith.recipes.results import write_result


def main() -> None:
    """Measure and print; `--json` writes the same numbers."""
    parser = argparse.ArgumentParser(description="Time group attention, folded against dense.")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="sequence lengths S")
    parser.add_argument("--masks", type=int, default=4, help="K")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7, help="measurements of each backend")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for length in options.lengths:
        row = measure(length, options.masks, options.heads, options.head_size, options.turns, device)
        rows.append(row)
        print(
            f"S={length:5d}  folded {row['folded_ms']:8.1f} ms  dense {row['dense_ms']:8.1f} ms  "
            f"speedup {row['speedup']:.1f}x  (dense mask {row['dense_mask_bytes'] / 2**20:.0f} MiB)",
            flush=True,
        )
    if options.json:
        name = torch.cuda.get_device_name() if device.type == "cuda" else None
        write_result(options.json, {"device": name, "threads": torch.get_num_threads(), "rows": rows})


def measure(
    length: int, num_masks: int, num_heads: int, head_size: int, turns: int, device: torch.device
) -> dict[str, float | int]:
    """Medians over alternating turns, after one turn to warm up."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, num_heads, num_masks + 1, length, head_size)
    qkv = [torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(3)]
    works: dict[str, Work] = {backend: partial(forward_backward, qkv, backend) for backend in ("folded", "dense")}
    times_s = in_turns(works, device, turns, warmup=1)
    ratios = [dense / folded for folded, dense in zip(times_s["folded"], times_s["dense"], strict=True)]
    return {
        "length_tokens": length,
        "masks": num_masks,
        "heads": num_heads,
        "head_size": head_size,
        "folded_ms": 1e3 * statistics.median(times_s["folded"]),
        "dense_ms": 1e3 * statistics.median(times_s["dense"]),
        "speedup": statistics.median(ratios),
        "dense_mask_bytes": (length * (num_masks + 1)) ** 2,
    }


def forward_backward(qkv: list[Tensor], backend: str) -> None:
    for part in qkv:
        part.grad = None
    q_bhgsd, k_bhgsd, v_bhgsd = qkv
    out = group_attention(q_bhgsd, k_bhgsd, v_bhgsd, backend=backend)
    out.backward(torch.ones_like(out))


if __name__ == "__main__":
    main()
