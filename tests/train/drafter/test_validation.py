"""Held-out rows decide which weights are kept, also in a resumed run."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.tiny_runs import (
    have_equal_weights,
    history_of,
    make_recipe,
    weights_of,
)

from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.report import TrainReport
from draftsmith.train.drafter.stage import train_drafter

STEPS = 16


def validated(target: Path, name: str, **train: Any) -> Recipe:
    """Return a recipe with a learning rate at which tau rises and falls."""
    values = {"max_steps": STEPS, "learning_rate": 0.6, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    recipe = make_recipe(target, name, **{**values, "save_total_limit": 2, **train}).model_dump()
    recipe["data"]["eval_rows_frac"] = 0.3
    return Recipe.model_validate(recipe)


def best_step(recipe: Recipe) -> int | None:
    return json.loads((RunFolder(recipe).drafter / "training.json").read_text())["best_step"]


def taus_by_step(recipe: Recipe) -> dict[int, float]:
    """Return tau of the longest chain by step."""
    return {int(log["step"]): log["eval_tau_depth3"] for log in history_of(recipe) if "eval_tau_depth3" in log}


def test_best_weights_are_kept(target_folder: Path) -> None:
    best = validated(target_folder, "best", load_best_model_at_end=True)
    train_drafter(best)
    folder, values = RunFolder(best).drafter, taus_by_step(best)
    step = next(step for step, tau in values.items() if tau == max(values.values()))
    assert 2 < step < STEPS  # otherwise this would prove nothing
    assert best_step(best) == step
    kept = load_file(folder / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights_of(best).items())
    report = TrainReport.read(folder)
    assert report.heldout_tau[-1] == max(values.values())
    assert report.heldout_rows
    assert f"on {report.heldout_rows} held-out examples: " in report.sentence()
    assert f"with the weights of step {step}, the best there" in report.sentence()
    last = validated(target_folder, "last")
    train_drafter(last)
    assert taus_by_step(last) == values
    assert not have_equal_weights(last, best)
    assert TrainReport.read(RunFolder(last).drafter).heldout_tau[-1] == values[STEPS]
    # Killed after its last checkpoint: no further step, the same weights.
    for name in ("training.json", "model.safetensors"):
        (folder / name).unlink()
    again = train_drafter(best)
    assert (again.steps, again.best_step) == (report.steps, report.best_step)
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights_of(best).items())
