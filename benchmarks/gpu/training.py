"""A training step of `parallel` at SmolLM2-135M's shape in bf16, in turns with its parts alone: tokens/s and seconds.

The parts are bounds, by other libraries' code where it exists: the target's forward; one decoder layer of transformers
with plain causal attention over G sequences of S rows, forward and backward; the chunked loss of the labelled rows. In
addition, the step builds the rows and their labels, merges own groups into the attention and reads its inputs by `fc`.

Shapes: G depths, S positions, D hidden, N labelled rows.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from parts.shapes import random_target
from parts.timing import Work, in_turns, peak_growth_bytes
from torch import Tensor
from transformers import LlamaModel, PreTrainedModel

from draftsmith.models.drafters.parallel import ParallelDrafter
from draftsmith.models.kernels.attention import use_own_attention
from draftsmith.models.kernels.cuda_attention import without_cudnn_attention
from draftsmith.models.loss import HeadRows, head_loss
from draftsmith.models.target.features import target_features
from gpu.step import Step, run_step

NUM_MASKS = 4


def main(step: Step) -> None:
    torch.manual_seed(0)
    target = random_target(step.size("135m", "embedded"), step.device, "bfloat16")
    use_own_attention(target)
    with without_cudnn_attention():
        step.add("folded", step_beside_its_parts(target, step.size(2048, 64), step.size(7, 1)))


def step_beside_its_parts(target: PreTrainedModel, length: int, turns: int) -> dict[str, Any]:
    """Return medians of the step and its parts; `ratio`: of the step to the sum of its parts in the same turn."""
    device, masks = target.device, NUM_MASKS
    torch.manual_seed(0)
    with torch.device(device):  # in fp32, under autocast where the target is in half precision
        drafter = ParallelDrafter.from_target(target, {"num_masks": masks, "inputs": "both"}).train()
    optimizer = torch.optim.AdamW([each for each in drafter.parameters() if each.requires_grad], lr=1e-4, fused=True)
    ids = torch.randint(3, target.config.vocab_size, (1, length), device=device)
    labelled = torch.ones_like(ids)
    rows = int(drafter.label_counts(drafter.groups(ids, labelled))[0].sum())
    half = partial(torch.autocast, device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16)

    def step() -> None:
        features = target_features(target, ids)
        with half():
            loss = drafter(ids, features, labelled).loss
        loss.backward()

    def optimize() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def both() -> None:
        step()
        optimize()

    works: dict[str, Work] = {
        "step": step,
        "optimizer": optimize,
        "target": lambda: target_features(target, ids),
        "layer": causal_layer(target, masks + 1, length, half),
        "loss": chunked_loss(target, rows, half),
    }
    times_s = in_turns(works, device, turns)
    bounds_s = [sum(parts) for parts in zip(times_s["target"], times_s["layer"], times_s["loss"], strict=True)]
    whole_s = [sum(parts) for parts in zip(times_s["step"], times_s["optimizer"], strict=True)]
    return {
        **{f"{name}_s": median(times) for name, times in times_s.items()},
        "tokens_per_s": length / median(whole_s),
        "peak_bytes": peak_growth_bytes(both, device),
        "labelled_rows": rows,
        "ratio": median(step_s / bound_s for step_s, bound_s in zip(times_s["step"], bounds_s, strict=True)),
    }


def causal_layer(target: PreTrainedModel, depths: int, length: int, half: Callable[[], Any]) -> Work:
    """Build a forward and backward of transformers' layer, fp32, on [G, S, D]: one causal sequence per depth."""
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


def chunked_loss(target: PreTrainedModel, rows: int, half: Callable[[], Any]) -> Work:
    """Make a forward and backward of the cross entropy of N rows [N, D] through the target's frozen head."""
    device = target.device
    hidden = torch.randn(rows, target.config.hidden_size, device=device).requires_grad_()
    labels = torch.randint(3, target.config.vocab_size, (rows,), device=device)
    labelled = HeadRows.flat(labels, torch.full((rows,), 1 / rows, device=device), labels)

    def work() -> None:
        with half():
            loss = head_loss(target.get_output_embeddings(), hidden, labelled).loss
        loss.backward()
        hidden.grad = None

    return work


if __name__ == "__main__":
    run_step(main)
