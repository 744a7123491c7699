"""An allocation that fails is answered with what the step needs and the lines that make it less."""

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import make_recipe

from draftsmith.eval.commands.stages import run_train
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter import stage
from draftsmith.train.drafter.trainer import DrafterTrainer
from draftsmith.train.plan import out_of_memory
from draftsmith.train.plan.out_of_memory import (
    _candidates,
    is_out_of_memory,
    out_of_memory_explained,
    ways_out,
    with_lines,
)
from draftsmith.train.plan.plan import PlanOptions, make_plan

TOO_LARGE = 1 << 50


def with_options(recipe: Recipe, kind: str, **options: Any) -> Recipe:
    drafter = recipe.drafter.model_copy(update={"kind": kind, "options": options})
    return recipe.model_copy(update={"drafter": drafter})


class OutOfMemory(DrafterTrainer):
    """A real allocation, of a pebibyte, in the third step."""

    held: weakref.ref[Any]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            large = torch.zeros(1 << 10)
            OutOfMemory.held = weakref.ref(large)
            torch.empty(TOO_LARGE, dtype=torch.uint8)
        return super().compute_loss(*args, **kwargs)


def test_training_that_runs_out_of_memory(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(target_folder, "large", per_device_train_batch_size=4)
    monkeypatch.setattr(stage, "DrafterTrainer", OutOfMemory)
    with pytest.raises(UserError) as error:
        run_train(recipe)
    sentence = str(error.value)
    assert sentence.startswith("out of memory (")
    assert "train.per_device_train_batch_size=2 train.gradient_accumulation_steps=2 (" in sentence
    printed = capsys.readouterr().err
    plan = make_plan(recipe, PlanOptions(peak_tflops=1.0))
    for line in plan.memory:
        assert line.what in printed
    gc.collect()
    assert OutOfMemory.held() is None  # the failed step's tensors are freed before the plan is made


@pytest.mark.slow
def test_every_way_out_is_one(target_folder: Path) -> None:
    """Each is planned anew here, as a recipe of its own, and needs what was said."""
    recipe = with_options(make_recipe(target_folder, "ways", per_device_train_batch_size=6), "medusa")
    plan = make_plan(recipe, PlanOptions(peak_tflops=1.0))
    ways = ways_out(recipe, plan)
    assert "drafter.options.lm_heads" in {key for way in ways for key in way.lines}
    assert [way.lines.get("train.per_device_train_batch_size") for way in ways[:2]] == [3, 1]
    for way in ways:
        changed = with_lines(recipe, way.lines)
        assert changed is not None
        assert way.peak_bytes < plan.peak_bytes
        if "data.max_length_tokens" not in way.lines:  # whose rows are still to be made
            assert make_plan(changed, PlanOptions(peak_tflops=1.0)).peak_bytes == way.peak_bytes


def test_long_sequences_are_sent_to_parts(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where batches are of one row already; it is the same training, so it stands first."""
    recipe = with_options(make_recipe(target_folder, "long", per_device_train_batch_size=1), "parallel", num_masks=4)
    plan = make_plan(recipe, PlanOptions(peak_tflops=1.0))
    monkeypatch.setattr(out_of_memory, "_candidates", lambda of: itertools.islice(_candidates(of), 2))
    way = ways_out(recipe, plan)[0]
    assert way.lines == {"drafter.options.in_parts": True}
    changed = with_lines(recipe, way.lines)
    assert changed is not None
    assert make_plan(changed, PlanOptions(peak_tflops=1.0)).peak_bytes == way.peak_bytes < plan.peak_bytes
    assert str(way).startswith("drafter.options.in_parts=true (")
    for lines in ({"drafter.options.in_parts": True}, {"drafter.options.attention": "flex"}):
        there = with_lines(recipe, lines)
        assert there is not None
        assert {"drafter.options.in_parts": True} not in list(_candidates(there))


def test_what_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(TOO_LARGE, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_other_errors_pass(target_folder: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        out_of_memory_explained(make_recipe(target_folder, "other")),
    ):
        raise RuntimeError("in the middle of a step")
