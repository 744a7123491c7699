"""Whole training steps of the parallel drafter, by the project's own trainer: tokens/s, peak memory, and how much of
the device's matrix rate they use.

The work is that of `draftsmith plan` for the same step with `folded`; what `dense` computes in vain does not count.

Shapes: S sequence.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainingArguments

from draftsmith.recipes.schema import Recipe
from draftsmith.train.batches.collate import collate_right_padded
from draftsmith.train.drafter.trainer import DrafterTrainer
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.plan.plan import matmul_flops_per_s
from draftsmith.train.plan.step_cost import FakeTraining, StepCost
from parts.shapes import SEED, Shape, random_drafter, random_target
from parts.suite import Suite
from parts.timing import give_memory_back, wait

BACKENDS = {"cuda": ("folded", "flex", "dense"), "cpu": ("folded", "dense")}
KIND = "parallel"
WARMUP_STEPS = 3


class StepTimes(TrainerCallback):
    """Seconds of each optimiser step, from an idle device to an idle device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begin_s = device, 0.0
        self.times_s: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        wait(self._device)
        self._begin_s = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wait(self._device)
        self.times_s.append(time.perf_counter() - self._begin_s)


def run(suite: Suite) -> None:
    shape, device = suite.shape, suite.device
    peak = matmul_flops_per_s(device, shape.torch_dtype)
    for rows in sorted({1, shape.rows}):
        backends = BACKENDS[device.type] if rows == 1 else ("folded",)
        for backend in backends:
            suite.measure(f"{backend}_{rows}x{shape.length}", figures, shape, device, backend, rows, peak)


def figures(shape: Shape, device: torch.device, backend: str, rows: int, peak_flops_per_s: float) -> dict[str, Any]:
    """Of steps on so many rows of S tokens, all of them labelled."""
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(shape, device, Path(folder), rows, WARMUP_STEPS + shape.training_steps)
        cost = planned(shape, args, Path(folder), rows)
        target = random_target(shape, device)
        drafter = random_drafter(KIND, target, attention=backend)
        data = Dataset.from_list([random_row(shape, number) for number in range(rows * args.max_steps)])
        trainer, times = DrafterTrainer(drafter, target, args, data), StepTimes(device)
        trainer.add_callback(times)
        give_memory_back(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer.train()
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    step_s = statistics.median(times.times_s[WARMUP_STEPS:])
    flops = sum(cost.flops().values())
    return {
        "step_s": step_s,
        "tokens_per_s": rows * shape.length / step_s,
        "flops": flops,
        "roofline_frac": flops / (step_s * peak_flops_per_s),
        "peak_bytes": peak_bytes,
        "planned_peak_bytes": cost.peak[1].peak_bytes,
        "loss": trainer.state.log_history[-1]["train_loss"],
    }


def arguments(shape: Shape, device: torch.device, folder: Path, rows: int, steps: int) -> TrainingArguments:
    values = {
        "per_device_train_batch_size": rows,
        "max_steps": steps,
        "learning_rate": 1.0e-4,
        "bf16": shape.torch_dtype == torch.bfloat16,
        "save_strategy": "no",
        "logging_steps": 1_000_000,
        "disable_tqdm": True,
    }
    return training_arguments(values, folder, SEED, use_cpu=device.type == "cpu")


def planned(shape: Shape, args: TrainingArguments, folder: Path, rows: int) -> StepCost:
    """What `draftsmith plan` says of such a step."""
    shape.config.save_pretrained(folder / "target")
    recipe = Recipe.model_validate(
        {
            "name": "gpu",
            "target": {"model": str(folder / "target"), "dtype": shape.dtype},
            "drafter": {"kind": KIND, "options": {"num_masks": shape.num_masks}},
        }
    )
    inputs = collate_right_padded([random_row(shape, number) for number in range(rows)])
    return FakeTraining(recipe, args).step(inputs)


def random_row(shape: Shape, number: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, shape.vocabulary, (shape.length,), generator=generator).tolist()
    return {"input_ids": ids, "loss_mask": [1] * len(ids)}
