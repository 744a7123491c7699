"""A training step against the sum of what its parts need at least, in turns: what our own code adds.

    OMP_NUM_THREADS=2 python benchmarks/gpu.py --shape 135m --parts step_bound --json FILE     # on a CPU
    OMP_NUM_THREADS=2 python benchmarks/gpu.py --shape embedded --parts step_bound --json FILE

The parts, each alone and by other people's code where there is any: the target's forward; one decoder layer of
transformers with plain causal attention over G sequences of S rows, forward and backward; the chunked loss of as many
rows as carry a label. The step is all of that for the parallel drafter: besides, it makes the rows and their labels,
merges own groups into the attention, and reads its inputs by `fc`. The optimiser's step is timed apart. The trainer's
step, between which all of these are timed, is the same with the optimiser, its guard rails and its counters.

Shapes: G = K+1 streams, S positions, D hidden, N labelled rows.
"""

import statistics
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaModel, PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.head_loss import head_loss
from draftsmith.models.target.features import target_features
from draftsmith.train.drafter.trainer import DrafterTrainer
from parts.launches import launches_per_round
from parts.shapes import SEED, Shape, random_drafter, random_target
from parts.suite import Suite
from parts.timing import Work, seconds
from parts.training import StepTimes, arguments, random_row

WARMUP_TURNS = 2
Half = Callable[[], AbstractContextManager[Any]]


def run(suite: Suite) -> None:
    suite.measure("parallel", figures, suite)


def figures(suite: Suite) -> dict[str, Any]:
    """Medians of each, and the ratio of the step to the sum, by turns."""
    shape, device = suite.shape, suite.device
    target = random_target(shape, device)
    drafter = random_drafter("parallel", target, num_masks=shape.num_masks).train()
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

    works = {
        "step": step,
        "optimizer": optimize,
        "target": lambda: target_features(target, ids),
        "layer": causal_layer(target, shape.num_masks + 1, shape.length, half),
        "loss": chunked_loss(target, rows, half),
    }
    times_s = between_steps(works, shape, target, drafter)

    def steps(number: int) -> int:
        for _ in range(number):
            step()
            optimize()
        return number

    bounds_s = [sum(parts) for parts in zip(times_s["target"], times_s["layer"], times_s["loss"], strict=True)]
    whole_s = [sum(both) for both in zip(times_s["step"], times_s["optimizer"], strict=True)]
    trainer_s = times_s["trainer_step"]
    return {
        **{f"{name}_s": statistics.median(times) for name, times in times_s.items()},
        "labelled_rows": rows,
        "step": launches_per_round(steps, 1, 3, device),
        **ratios("ratio", times_s["step"], bounds_s),
        **ratios("ratio_with_optimizer", whole_s, bounds_s),
        **ratios("ratio_of_trainer", trainer_s, bounds_s),
    }


class BetweenSteps(StepTimes):
    """After each step of the trainer, the seconds of each work."""

    def __init__(self, works: dict[str, Work], device: torch.device) -> None:
        super().__init__(device)
        self.work_times_s: dict[str, list[float]] = {name: [] for name in works}
        self._works, self._device = works, device

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        super().on_step_end(*arguments, **named)
        for name, work in self._works.items():
            self.work_times_s[name].append(seconds(work, self._device))


def between_steps(
    works: dict[str, Work], shape: Shape, target: PreTrainedModel, drafter: Drafter
) -> dict[str, list[float]]:
    """Seconds of each work and of the trainer's step, on rows of S tokens, in turns: other work slows all of them."""
    turns = WARMUP_TURNS + shape.repeats
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(shape, target.device, Path(folder), rows=1, steps=turns)
        data = Dataset.from_list([random_row(shape, number) for number in range(turns)])
        trainer, times = DrafterTrainer(drafter, target, args, data), BetweenSteps(works, target.device)
        trainer.add_callback(times)
        trainer.train()
    every = {**times.work_times_s, "trainer_step": times.times_s}
    return {name: times_s[WARMUP_TURNS:] for name, times_s in every.items()}


def ratios(name: str, times_s: list[float], bounds_s: list[float]) -> dict[str, float]:
    """Median and extremes by turns, and the ratio of the best times, which other work on the machine spoils least."""
    by_turn = [time_s / bound_s for time_s, bound_s in zip(times_s, bounds_s, strict=True)]
    return {
        name: statistics.median(by_turn),
        f"{name}_lowest": min(by_turn),
        f"{name}_highest": max(by_turn),
        f"{name}_of_best": min(times_s) / min(bounds_s),
    }


def causal_layer(target: PreTrainedModel, streams: int, length: int, half: Half) -> Callable[[], None]:
    """Forward and backward of transformers' own layer in fp32 weights, on [G, S, D]: one causal sequence a stream."""
    torch.manual_seed(SEED)
    config = type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": 1, "vocab_size": 8})
    with torch.device(target.device):
        model = LlamaModel._from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
        positions = torch.arange(length)[None]
    hidden = torch.randn(streams, length, config.hidden_size, device=target.device).requires_grad_()
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
    """Forward and backward of the cross entropy of N rows [N, D] through the target's frozen head."""
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
