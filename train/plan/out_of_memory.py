"""Out of memory in training: what the step needs, by `draftsmith plan`, and lines of the recipe that make it less."""

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftsmith.errors import UserError
from draftsmith.files import bytes_text
from draftsmith.models.weights import is_out_of_memory
from draftsmith.recipes.schema import Recipe
from draftsmith.train.plan.plan import PlanOptions, make_plan


@contextmanager
def out_of_memory_explained(recipe: Recipe) -> Iterator[None]:
    """Report a failed allocation in this context: the plan's breakdown on stderr, and a sentence with the ways out.

    Raises:
        UserError: Memory ran out.
    """
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = " ".join(str(error).split(". ")[:3]) or "memory is used up"
        traceback.clear_frames(error.__traceback__)  # which hold the target, the drafter and the batch
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    plan = make_plan(recipe, PlanOptions(peak_tflops=1.0))
    print(f"{recipe.name}: what a training step needs, by `draftsmith plan`:", file=sys.stderr)
    for line in plan.memory:
        print(f"  {line.what:16} {bytes_text(line.amount):>10}  {line.how}", file=sys.stderr)
    raise UserError(
        f"out of memory ({message}): a step needs {bytes_text(plan.peak_bytes)}: {plan.ways_out}; then run the same "
        "command again, under another `name` if it asks"
    )
