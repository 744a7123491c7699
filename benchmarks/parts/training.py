"""Training: group attention, and a step of the parallel drafter against what its parts need at least.

`attention`: forward and backward against plain causal attention over the same queries, torch's own kernel with the
depths of a query head as grouped-query heads over the keys of the real tokens (part (a) of
`models/groups/attention.py`; no mask sees another).

`step_bound`: the step in turns with its parts, each alone and by other people's code where there is any: the target's
forward; one decoder layer of transformers with plain causal attention over G sequences of S rows, forward and backward;
the chunked loss of as many rows as carry a label. Besides, the step makes the rows and their labels, merges own groups
into the attention and reads its inputs by `fc`. The optimiser's step is timed apart.

    OMP_NUM_THREADS=2 python benchmarks/gpu.py --shape 135m --parts step_bound --json FILE     # on a CPU

Shapes: B batch (1), H query heads, Hkv key/value heads, G = K+1 depths, S positions, Dh head size, D hidden, N
labelled rows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaModel, PreTrainedModel

from draftsmith.models.groups.attention import group_attention
from draftsmith.models.losses import head_loss
from draftsmith.models.target.features import target_features
from parts.shapes import SEED, Shape, random_drafter, random_target
from parts.timing import Suite, Work, compare, in_turns, launches_per_round, peak_growth_bytes, ratios

BACKENDS = {"cuda": ("folded", "flex", "dense"), "cpu": ("folded", "dense")}  # flex has no backward on a CPU
KIND = "parallel"
Half = Callable[[], AbstractContextManager[Any]]


def attention(suite: Suite) -> None:
    """Measure each backend on queries [1, H, G, S, Dh], keys and values [1, Hkv, G, S, Dh], in the target's dtype."""
    shape, device = suite.shape, suite.device
    torch.manual_seed(SEED)
    sizes = (shape.num_masks + 1, shape.length, shape.hidden_size // shape.heads)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    qkv = [torch.randn(1, h, *sizes, device=device, dtype=shape.torch_dtype).requires_grad_() for h in heads]

    def figures(backend: str | None) -> dict[str, float | int | None]:
        work = forward_backward(qkv, backend)
        work()  # what it compiles is not its memory
        peak_bytes = peak_growth_bytes(work, device)
        return {**compare(work, forward_backward(qkv, None), device, shape.repeats), "peak_bytes": peak_bytes}

    for backend in (None, *BACKENDS[device.type]):
        suite.measure(backend or "causal", figures, backend)


def forward_backward(qkv: list[Tensor], backend: str | None) -> Work:
    """Make a forward and backward of group attention; None: of plain causal attention."""

    def work() -> None:
        q_bhgsd, k_bhgsd, v_bhgsd = qkv
        for part in qkv:
            part.grad = None
        if backend is not None:
            out = group_attention(q_bhgsd, k_bhgsd, v_bhgsd, backend=backend)
        else:
            k, v = k_bhgsd[:, :, 0], v_bhgsd[:, :, 0]
            out = F.scaled_dot_product_attention(q_bhgsd.flatten(1, 2), k, v, is_causal=True, enable_gqa=True)
        out.backward(torch.ones_like(out))

    return work


def step_bound(suite: Suite) -> None:
    """Measure whole steps by each backend; `parallel` is the one that training takes by default, `folded`."""
    for backend in BACKENDS[suite.device.type]:
        name = KIND if backend == "folded" else f"{KIND}, {backend}"
        suite.measure(name, figures_of_bound, suite.shape, suite.device, backend)


def figures_of_bound(shape: Shape, device: torch.device, backend: str) -> dict[str, Any]:
    """Measure the step and its parts: medians of each, and the ratio of the step to their sum, by turns."""
    target = random_target(shape, device)
    drafter = random_drafter(KIND, target, num_masks=shape.num_masks, attention=backend).train()
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(3, shape.vocabulary, (1, shape.length), device=device)
    labelled = torch.ones_like(ids)
    rows = int(drafter.label_counts(ids, labelled)[0].sum())

    def half() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16, enabled=shape.torch_dtype == torch.bfloat16)

    def step() -> None:
        features = target_features(target, ids)
        with half():
            loss = drafter(ids, features, labelled).loss
        loss.backward()

    def optimize() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def steps(number: int) -> int:
        for _ in range(number):
            step()
            optimize()
        return number

    works: dict[str, Work] = {
        "step": step,
        "optimizer": optimize,
        "target": lambda: target_features(target, ids),
        "layer": causal_layer(target, shape.num_masks + 1, shape.length, half),
        "loss": chunked_loss(target, rows, half),
    }
    times_s = in_turns(works, device, shape.repeats)
    bounds_s = [sum(parts) for parts in zip(times_s["target"], times_s["layer"], times_s["loss"], strict=True)]
    whole_s = [sum(both) for both in zip(times_s["step"], times_s["optimizer"], strict=True)]
    return {
        **{f"{name}_s": median(times) for name, times in times_s.items()},
        "tokens_per_s": shape.length / median(whole_s),
        "peak_bytes": peak_growth_bytes(lambda: steps(1), device),
        "labelled_rows": rows,
        "step": launches_per_round(steps, 1, 3, device),
        **ratios("ratio", times_s["step"], bounds_s),
        **ratios("ratio_with_optimizer", whole_s, bounds_s),
    }


def causal_layer(target: PreTrainedModel, depths: int, length: int, half: Half) -> Callable[[], None]:
    """Make a forward and backward of transformers' layer in fp32 weights, on [G, S, D]: a causal sequence a depth."""
    torch.manual_seed(SEED)
    config = type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": 1, "vocab_size": 8})
    with torch.device(target.device):
        model = LlamaModel._from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
        positions = torch.arange(length)[None]
    hidden = torch.randn(depths, length, config.hidden_size, device=target.device).requires_grad_()
    rotary = model.rotary_emb(hidden, positions)

    def work() -> None:
        with half():
            out = model.layers[0](hidden, position_embeddings=rotary, attention_mask=None)
        out = out if isinstance(out, Tensor) else out[0]
        out.backward(torch.ones_like(out))
        model.zero_grad()
        hidden.grad = None

    return work


def chunked_loss(target: PreTrainedModel, rows: int, half: Half) -> Callable[[], None]:
    """Make a forward and backward of the cross entropy of N rows [N, D] through the target's frozen head."""
    config, device = target.config, target.device
    hidden = torch.randn(rows, config.hidden_size, device=device).requires_grad_()
    labels = torch.randint(3, config.vocab_size, (rows,), device=device)
    weights = torch.full((rows,), 1 / rows, device=device)

    def work() -> None:
        with half():
            loss = head_loss(hidden, target.get_output_embeddings(), labels, weights).loss
        loss.backward()
        hidden.grad = None

    return work
