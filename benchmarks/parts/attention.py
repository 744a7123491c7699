"""Group attention, forward and backward, against plain causal attention over the same queries.

Plain: torch's own kernel, the streams of a query head as grouped-query heads over the keys of the real tokens; that is
part (a) of `models/groups/attention.py`, and no mask sees another.

Shapes: B batch (1), H query heads, Hkv key/value heads, G streams, S positions, Dh head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.groups.attention import group_attention
from parts.shapes import SEED, Shape
from parts.suite import Suite
from parts.timing import Work, compare, peak_growth_bytes

BACKENDS = {"cuda": ("folded", "flex", "dense"), "cpu": ("folded", "dense")}  # flex has no backward on a CPU


def run(suite: Suite) -> None:
    parts = random_parts(suite.shape, suite.device)
    for backend in (None, *BACKENDS[suite.device.type]):
        suite.measure(backend or "causal", figures, suite, parts, backend)


def figures(suite: Suite, parts: list[Tensor], backend: str | None) -> dict[str, float | int | None]:
    work = forward_backward(parts, backend)
    work()  # what it compiles is not its memory
    peak_bytes = peak_growth_bytes(work, suite.device)
    return {**compare(work, forward_backward(parts, None), suite.device, suite.shape.repeats), "peak_bytes": peak_bytes}


def random_parts(shape: Shape, device: torch.device) -> list[Tensor]:
    """Queries [1, H, G, S, Dh], keys and values [1, Hkv, G, S, Dh], in the target's dtype."""
    torch.manual_seed(SEED)
    sizes = (shape.num_masks + 1, shape.length, shape.hidden_size // shape.heads)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [torch.randn(1, h, *sizes, device=device, dtype=shape.torch_dtype).requires_grad_() for h in heads]


def forward_backward(parts: list[Tensor], backend: str | None) -> Work:
    """Of group attention; None: plain causal attention."""

    def work() -> None:
        q_bhgsd, k_bhgsd, v_bhgsd = parts
        for part in parts:
            part.grad = None
        if backend is not None:
            out = group_attention(q_bhgsd, k_bhgsd, v_bhgsd, backend=backend)
        else:
            k, v = k_bhgsd[:, :, 0], v_bhgsd[:, :, 0]
            out = F.scaled_dot_product_attention(q_bhgsd.flatten(1, 2), k, v, is_causal=True, enable_gqa=True)
        out.backward(torch.ones_like(out))

    return work
