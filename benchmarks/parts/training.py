"""Training: group attention, whole steps of the parallel drafter, and a step against what its parts need at least.

`attention`: forward and backward against plain causal attention over the same queries, torch's own kernel with the
depths of a query head as grouped-query heads over the keys of the real tokens (part (a) of
`models/groups/attention.py`; no mask sees another).

`training`: steps by the project's own trainer: tokens/s, peak memory, and how much of the device's matrix rate they
use. The work is that of `draftsmith plan` for the same step with `folded`; what `dense` computes in vain is left out.

`step_bound`: the step in turns with its parts, each alone and by other people's code where there is any: the target's
forward; one decoder layer of transformers with plain causal attention over G sequences of S rows, forward and backward;
the chunked loss of as many rows as carry a label. Besides, the step makes the rows and their labels, merges own groups
into the attention and reads its inputs by `fc`. The optimiser's step is timed apart. The trainer's step is the same
with the optimiser, its guard rails and its counters.

    OMP_NUM_THREADS=2 python benchmarks/gpu.py --shape 135m --parts step_bound --json FILE     # on a CPU

Shapes: B batch (1), H query heads, Hkv key/value heads, G = K+1 depths, S positions, Dh head size, D hidden, N
labelled rows.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from transformers import LlamaModel, PreTrainedModel, TrainerCallback, TrainingArguments

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.groups.attention import group_attention
from draftsmith.models.head_loss import head_loss
from draftsmith.models.target.features import target_features
from draftsmith.recipes.schema import Recipe
from draftsmith.train.batches.collate import collate_right_padded
from draftsmith.train.drafter.trainer import DrafterTrainer
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.plan.fake_step import FakeTraining, StepCost
from draftsmith.train.plan.plan import matmul_flops_per_s
from parts.shapes import SEED, Shape, random_drafter, random_target
from parts.timing import (
    Suite,
    Work,
    compare,
    free_memory,
    launches_per_round,
    peak_growth_bytes,
    ratios,
    seconds,
    wait,
)

BACKENDS = {"cuda": ("folded", "flex", "dense"), "cpu": ("folded", "dense")}  # flex has no backward on a CPU
KIND = "parallel"
WARMUP_STEPS = 3
WARMUP_TURNS = 2
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


class StepTimes(TrainerCallback):
    """Note the seconds of each optimiser step, from an idle device to an idle device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begin_s = device, 0.0
        self.times_s: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        wait(self._device)
        self._begin_s = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wait(self._device)
        self.times_s.append(time.perf_counter() - self._begin_s)


def training(suite: Suite) -> None:
    shape, device = suite.shape, suite.device
    peak = matmul_flops_per_s(device, shape.torch_dtype)
    for rows in sorted({1, shape.rows}):
        backends = BACKENDS[device.type] if rows == 1 else ("folded",)
        for backend in backends:
            suite.measure(f"{backend}_{rows}x{shape.length}", figures_of_training, shape, device, backend, rows, peak)


def figures_of_training(
    shape: Shape, device: torch.device, backend: str, rows: int, peak_flops_per_s: float
) -> dict[str, Any]:
    """Measure steps on so many rows of S tokens, all of them labelled."""
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(shape, device, Path(folder), rows, WARMUP_STEPS + shape.training_steps)
        cost = planned(shape, args, Path(folder), rows)
        target = random_target(shape, device)
        drafter = random_drafter(KIND, target, attention=backend)
        data = Dataset.from_list([random_row(shape, number) for number in range(rows * args.max_steps)])
        trainer, times = DrafterTrainer(drafter, target, args, data), StepTimes(device)
        trainer.add_callback(times)
        free_memory(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer.train()
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    step_s = median(times.times_s[WARMUP_STEPS:])
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
    """Return what `draftsmith plan` says of such a step."""
    shape.config.save_pretrained(folder / "target")
    drafter = {"kind": KIND, "options": {"num_masks": shape.num_masks}}
    target = {"model": str(folder / "target"), "dtype": shape.dtype}
    recipe = Recipe.model_validate({"name": "gpu", "target": target, "drafter": drafter})
    inputs = collate_right_padded([random_row(shape, number) for number in range(rows)])
    return FakeTraining(recipe, args).step(inputs)


def random_row(shape: Shape, number: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, shape.vocabulary, (shape.length,), generator=generator).tolist()
    return {"input_ids": ids, "loss_mask": [1] * len(ids)}


def step_bound(suite: Suite) -> None:
    suite.measure(KIND, figures_of_bound, suite.shape, suite.device)


def figures_of_bound(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Measure the step and its parts: medians of each, and the ratio of the step to their sum, by turns."""
    target = random_target(shape, device)
    drafter = random_drafter(KIND, target, num_masks=shape.num_masks).train()
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
    return {
        **{f"{name}_s": median(times) for name, times in times_s.items()},
        "labelled_rows": rows,
        "step": launches_per_round(steps, 1, 3, device),
        **ratios("ratio", times_s["step"], bounds_s),
        **ratios("ratio_with_optimizer", whole_s, bounds_s),
        **ratios("ratio_of_trainer", times_s["trainer_step"], bounds_s),
    }


class BetweenSteps(StepTimes):
    """Note the seconds of each work after each step of the trainer."""

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
    """Time each work and the trainer's step on rows of S tokens, in turns: whatever else runs slows all of them."""
    turns = WARMUP_TURNS + shape.repeats
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(shape, target.device, Path(folder), rows=1, steps=turns)
        data = Dataset.from_list([random_row(shape, number) for number in range(turns)])
        trainer, times = DrafterTrainer(drafter, target, args, data), BetweenSteps(works, target.device)
        trainer.add_callback(times)
        trainer.train()
    every = {**times.work_times_s, "trainer_step": times.times_s}
    return {name: times_s[WARMUP_TURNS:] for name, times_s in every.items()}


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
