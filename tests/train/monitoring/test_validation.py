"""Rows kept out of training decide which weights are kept and when it ends, exactly as well when a run goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import InterruptAt, make_recipe

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter import stage
from draftsmith.train.drafter.report import TrainReport
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.trainer import DrafterTrainer

STEPS = 16


def validated(target_folder: Path, name: str, validation: dict[str, Any], **train: Any) -> Recipe:
    """A learning rate at which tau goes up and down."""
    values = make_recipe(
        target_folder, name, max_steps=STEPS, learning_rate=0.4, eval_strategy="steps", eval_steps=2, save_steps=5,
        save_total_limit=2, **train,
    ).model_dump()  # fmt: skip
    values["data"]["eval_rows_frac"] = 0.3
    values["validation"] = validation
    return Recipe.model_validate(values)


def training_of(recipe: Recipe) -> dict[str, Any]:
    return json.loads((RunFolder(recipe).drafter / "training.json").read_text())


def taus(recipe: Recipe) -> dict[int, float]:
    """Of the longest chain, by step."""
    history = training_of(recipe)["history"]
    return {log["step"]: log["eval_tau_depth3"] for log in history if "eval_tau_depth3" in log}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def best(target_folder: Path) -> Recipe:
    recipe = validated(target_folder, "best", {"keep": "best"})
    train_drafter(recipe)
    return recipe


def first_best(values: dict[int, float]) -> int:
    return next(step for step, tau in values.items() if tau == max(values.values()))


def test_the_best_weights_are_kept(best: Recipe, target_folder: Path) -> None:
    folder, values = RunFolder(best).drafter, taus(best)
    step = first_best(values)
    assert 2 < step < STEPS  # else this would say nothing; and a step that is saved for this alone
    assert step % 5
    assert training_of(best)["best_step"] == step
    assert same(weights(folder), weights(folder / "checkpoints" / f"checkpoint-{step}"))
    report = TrainReport.read(folder)
    assert report.heldout_tau[-1] == max(values.values())
    assert f"with the weights of step {step}, the best there" in report.sentence()
    last = validated(target_folder, "last", {})
    train_drafter(last)
    assert taus(last) == values
    assert not same(weights(RunFolder(last).drafter), weights(folder))
    assert TrainReport.read(RunFolder(last).drafter).heldout_tau[-1] == values[STEPS]


def test_the_last_step_is_evaluated_and_may_be_the_best(target_folder: Path) -> None:
    recipe = validated(target_folder, "odd", {"keep": "best"}, eval_delay=0)
    recipe = recipe.model_copy(update={"train": {**recipe.train, "max_steps": 5, "eval_steps": 4}})
    train_drafter(recipe)
    assert taus(recipe).keys() == {4, 5}


@pytest.mark.parametrize("patience", [1, 2])
def test_training_ends_when_tau_rises_no_more(best: Recipe, target_folder: Path, patience: int) -> None:
    """At the first evaluation that is the n-th in a row without a new best; the sequence is that of the whole run."""
    values, waited, highest, expected = taus(best), 0, 0.0, STEPS
    for step, tau in values.items():
        waited, highest = (0, tau) if tau > highest else (waited + 1, highest)
        if waited == patience:
            expected = step
            break
    assert expected < STEPS
    recipe = validated(target_folder, "patient", {"keep": "best", "patience": patience})
    report = train_drafter(recipe)
    assert report.steps == expected
    assert report.stopped_early
    assert taus(recipe) == {step: tau for step, tau in values.items() if step <= expected}
    assert training_of(recipe)["best_step"] == first_best(taus(recipe))


@pytest.mark.parametrize("interrupted_at", [3, 9])
def test_interrupted_and_resumed_is_uninterrupted(
    best: Recipe, target_folder: Path, monkeypatch: pytest.MonkeyPatch, interrupted_at: int
) -> None:
    recipe = validated(target_folder, "broken", {"keep": "best"})

    class Interrupted(DrafterTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[InterruptAt(interrupted_at)], **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "DrafterTrainer", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(recipe)
    train_drafter(recipe)
    assert taus(recipe) == taus(best)
    assert training_of(recipe)["best_step"] == training_of(best)["best_step"]
    assert same(weights(RunFolder(recipe).drafter), weights(RunFolder(best).drafter))


def test_a_run_that_validation_ended_is_taken_over(target_folder: Path) -> None:
    """Killed between its last checkpoint and its end: no step more, the same weights."""
    recipe = validated(target_folder, "ended", {"keep": "best", "patience": 1}, save_strategy="steps")
    recipe = recipe.model_copy(update={"train": {**recipe.train, "save_steps": 2}})
    report = train_drafter(recipe)
    folder = RunFolder(recipe).drafter
    expected = weights(folder)
    for name in ("training.json", "model.safetensors"):
        (folder / name).unlink()
    again = train_drafter(recipe)
    assert (again.steps, again.best_step) == (report.steps, report.best_step)
    assert same(weights(folder), expected)


@pytest.mark.parametrize(
    ("validation", "train", "message"),
    [
        (
            {"keep": "best"},
            {"eval_strategy": "no"},
            "`validation.keep=best` needs evaluations: set train.eval_strategy",
        ),
        ({"patience": 2}, {"eval_strategy": "no"}, "`validation.patience` needs evaluations"),
        ({"keep": "best"}, {"save_strategy": "no"}, "`validation.keep`: .* leave out train.save_strategy=no"),
        (
            {},
            {"load_best_model_at_end": True, "save_steps": 2},
            "leave it out; validation.keep=best is what it would be",
        ),
    ],
)
def test_what_does_not_go_together(
    target_folder: Path, validation: dict[str, Any], train: dict[str, Any], message: str
) -> None:
    recipe = validated(target_folder, "refused", validation)
    with pytest.raises(UserError, match=message):
        train_drafter(recipe.model_copy(update={"train": {**recipe.train, **train}}))


def test_a_decode_needs_prompts(target_folder: Path) -> None:
    values = validated(target_folder, "no-prompts", {"decode_steps": 2}).model_dump()
    values["data"]["eval_rows_frac"] = 0.0
    values["train"]["eval_strategy"] = "no"
    with pytest.raises(UserError, match=r"takes its prompts from rows kept out of training: set data\.eval_rows_frac"):
        train_drafter(Recipe.model_validate(values))


def test_other_validation_is_another_training(best: Recipe) -> None:
    changed = best.model_copy(update={"train": {**best.train, "eval_steps": 4}})
    with pytest.raises(UserError, match=r"begun with train.eval_steps = 2, now it is 4"):
        train_drafter(changed)
