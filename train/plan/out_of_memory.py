"""Out of memory in training: what the step needs, by `draftsmith plan`, and which lines of the recipe make it less.

Every line that is proposed was planned: beside it stands the peak that a step would have with it.
"""

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.models.target.loading import target_device
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.provenance import Machine
from draftsmith.recipes.run_folder import RunFolder, bytes_text
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.plan.batches import training_data
from draftsmith.train.plan.plan import Plan, PlanOptions, make_plan, plannable
from draftsmith.train.plan.step_cost import FakeTraining
from draftsmith.train.processes.launch import launch_of

# What torch's allocators say where they raise a plain RuntimeError.
OF_THE_CPU = ("can't allocate memory", "not enough memory")
SMALLER_VOCABULARY = 32_000
SHOWN_WAYS = 4
THE_SAME_TRAINING = {"train.gradient_accumulation_steps", "drafter.options.in_parts"}
WORTH_FRAC = 0.98  # of the peak: what saves less is not proposed


@dataclass(frozen=True)
class WayOut:
    """Lines of the recipe, by key, and the peak of a step with them."""

    lines: dict[str, Any]
    peak_bytes: int

    def __str__(self) -> str:
        texts = {key: str(value).lower() if value is True else value for key, value in self.lines.items()}
        lines = " ".join(f"{key}={text}" for key, text in texts.items())
        return f"{lines} ({bytes_text(self.peak_bytes)})"


@contextmanager
def out_of_memory_explained(recipe: Recipe) -> Iterator[None]:
    """Turn an allocation that failed in here into the plan's breakdown, on stderr, and a sentence with the ways out.

    Raises:
        UserError: Memory ran out.
    """
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = " ".join(str(error).split(". ")[:2]) or "memory is used up"
        traceback.clear_frames(error.__traceback__)  # which hold the target, the drafter and the batch
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise UserError(_explanation(recipe, said))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OF_THE_CPU)


def _explanation(recipe: Recipe, said: str) -> str:
    """Prints the breakdown."""
    memory_bytes, others_bytes = _memory(recipe)
    plan = make_plan(recipe, PlanOptions(peak_tflops=1.0))
    print(f"{recipe.name}: what a training step needs, by `draftsmith plan`:", file=sys.stderr)
    for line in plan.memory:
        print(f"  {line.what:18} {bytes_text(line.amount):>10}  {line.how}", file=sys.stderr)
    need = f"a step needs {bytes_text(plan.peak_bytes)}"
    if memory_bytes is not None:
        need += f" of {bytes_text(memory_bytes)}"
    if memory_bytes is not None and others_bytes > memory_bytes // 20:
        need += f", of which others use {bytes_text(others_bytes)}"
    ways = [str(way) for way in ways_out(recipe, plan)[:SHOWN_WAYS]]
    advice = f"change {', or '.join(ways)}" if ways else "take a smaller target"
    return f"out of memory ({said}): {need}: {advice}; then run the same command again, under another `name` if it asks"


def _memory(recipe: Recipe) -> tuple[int | None, int]:
    """Bytes of the device, and how many of them are neither free nor this process's."""
    device = target_device(recipe.target)
    if device.type != "cuda":
        return Machine.here().memory_bytes, 0
    free, total = torch.cuda.mem_get_info(device)
    return total, total - free - torch.cuda.memory_reserved(device)


def ways_out(recipe: Recipe, plan: Plan) -> list[WayOut]:
    """Changes of the recipe by which a step needs less, the same training first, then by what they leave."""
    ways = []
    for lines in _candidates(recipe):
        peak = _peak_bytes(with_lines(recipe, lines))
        if peak is not None and peak < WORTH_FRAC * plan.peak_bytes:
            ways.append(WayOut(lines, peak))
    same = [way for way in ways if not THE_SAME_TRAINING.isdisjoint(way.lines)]
    return same + sorted((way for way in ways if way not in same), key=lambda way: way.peak_bytes)


def _candidates(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """What could be changed, whether or not this kind of drafter has it."""
    args = _arguments(recipe)
    rows, options = args.per_device_train_batch_size, recipe.drafter.options
    for fewer in sorted({max(1, rows // 2), 1} - {rows}, reverse=True):
        if rows % fewer == 0:
            accumulation = args.gradient_accumulation_steps * rows // fewer
            yield {"train.per_device_train_batch_size": fewer, "train.gradient_accumulation_steps": accumulation}
    if not options.get("in_parts") and options.get("attention") != "flex" and not launch_of(args).splits_weights:
        yield {"drafter.options.in_parts": True}
    yield {"data.max_length_tokens": recipe.data.max_length_tokens // 2}
    if recipe.target.dtype not in ("bfloat16", "float16"):
        yield {"target.dtype": "bfloat16"}
    if not (args.bf16 or args.fp16):
        yield {"train.bf16": True}
    if recipe.data.features.source == "online":
        yield {"data.features.source": "offline"}
    if options.get("lm_heads", "separate") == "separate":
        yield {"drafter.options.lm_heads": "shared"}
    if options.get("draft_vocab_size") is None:
        yield {"drafter.options.draft_vocab_size": SMALLER_VOCABULARY}
    if options.get("attention") == "dense":
        yield {"drafter.options.attention": "folded"}
    if args.optim.value.startswith("adamw_torch"):
        yield {"train.optim": "adafactor"}


def _peak_bytes(recipe: Recipe | None) -> int | None:
    """Of a step; None if there is no such recipe."""
    if recipe is None:
        return None
    try:
        args = _arguments(recipe)
        data = training_data(recipe, args.per_device_train_batch_size)
        inputs = data.largest.inputs
        shortest = recipe.data.max_length_tokens  # rows on disk may be those of the recipe as it was
        inputs = {name: value[:, :shortest] for name, value in inputs.items()}
        return FakeTraining(plannable(recipe)[0], args).step(inputs).peak[1].peak_bytes
    except UserError:  # not for this kind, or not for this target
        return None


def _arguments(recipe: Recipe) -> Any:
    folder, device = RunFolder(recipe).drafter / "checkpoints", target_device(recipe.target)
    return training_arguments(recipe.train, folder, recipe.seed, use_cpu=device.type == "cpu")


def with_lines(recipe: Recipe, lines: dict[str, Any]) -> Recipe | None:
    """The recipe with other values, by key; None if it then is no recipe."""
    values = recipe.model_dump()
    for key, value in lines.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    try:
        return Recipe.model_validate(values)
    except ValueError:
        return None
