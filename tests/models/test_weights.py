"""Models load completely or not at all, and weights that differ from training's are refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_drafter_of, tiny_target
from support.tiny_runs import make_recipe
from transformers import AutoModelForCausalLM

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.target.loading import load_target
from draftsmith.models.weights import load_weights
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import TargetRecipe
from draftsmith.train.drafter.stage import train_drafter

Weights = dict[str, torch.Tensor]


def drop_one(weights: Weights, name: str) -> None:
    del weights[name]


def add_one(weights: Weights, name: str) -> None:
    weights["made.up"] = torch.zeros(2)


def reshape_one(weights: Weights, name: str) -> None:
    weights[name] = weights[name][..., :-1].contiguous()


CHANGES = [
    (drop_one, "{name} missing"),
    (add_one, "made.up not of this architecture"),
    (reshape_one, "{name} of another shape"),
]


def change(folder: Path, how: Callable[[Weights, str], None], name: str) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    how(weights, name)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(("how", "message"), CHANGES)
@pytest.mark.parametrize("kind", ["parallel", "medusa", "eagle", "draft_model"])
def test_incomplete_drafters_are_refused(tmp_path: Path, kind: str, how: Any, message: str) -> None:
    target = tiny_target()
    tiny_drafter_of(kind, target).save_pretrained(tmp_path)
    name = sorted(load_file(tmp_path / "model.safetensors"))[0]
    load_drafter(tmp_path, target)
    change(tmp_path, how, name)
    with pytest.raises(UserError, match=message.format(name=name)):
        load_drafter(tmp_path, target)


@pytest.mark.parametrize(("how", "message"), CHANGES)
def test_incomplete_targets_and_draft_models_are_refused(
    tmp_path: Path, target_folder: Path, how: Any, message: str
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    load_target(TargetRecipe(model=str(target_folder), device="cpu"))
    change(target_folder, how, name)
    with pytest.raises(UserError, match=message.format(name=name)):
        load_target(TargetRecipe(model=str(target_folder), device="cpu"))
    with pytest.raises(UserError, match="draft model .*" + message.format(name=name)):
        load_weights("draft model", str(target_folder), AutoModelForCausalLM)


def test_weights_of_another_training_are_refused(target_folder: Path) -> None:
    """They are complete, with the right kind and shapes, but not those of `training.json`."""
    one, other = (make_recipe(target_folder, name, max_steps=steps) for name, steps in (("one", 1), ("other", 2)))
    target, _ = load_target(one.target)
    for recipe in (one, other):
        train_drafter(recipe)
        load_drafter(RunFolder(recipe).drafter, target)
    shutil.copy(RunFolder(other).drafter / "model.safetensors", RunFolder(one).drafter)
    with pytest.raises(UserError, match="not those that training wrote"):
        load_drafter(RunFolder(one).drafter, target)


def test_drafter_of_another_kind_is_refused(target_folder: Path) -> None:
    recipe = make_recipe(target_folder, "one", max_steps=1)
    train_drafter(recipe)
    file = RunFolder(recipe).drafter / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "model_type": "draftsmith-draft_model"}))
    with pytest.raises(UserError, match="says kind draft_model, but the weights are of a parallel"):
        load_drafter(RunFolder(recipe).drafter, load_target(recipe.target)[0])
