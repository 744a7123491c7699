"""`train.bf16` on a CPU, where a processor with bf16 products trains several times faster in it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import InterruptAt, make_recipe, train_until

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.stage import train_drafter


@pytest.mark.slow
def test_training_in_bf16_learns_as_in_fp32_and_resumes_bit_for_bit(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe_of(name: str, **train: Any) -> Recipe:
        return make_recipe(target_folder, name, max_steps=30, save_steps=10, **train)

    single, half, broken = recipe_of("single"), recipe_of("half", bf16=True), recipe_of("broken", bf16=True)
    in_single, in_half = train_drafter(single), train_drafter(half)
    assert in_half.loss == pytest.approx(in_single.loss, rel=0.1)
    assert in_half.loss < 0.7 * in_half.history[0]["loss"]
    train_until(InterruptAt(15), broken, monkeypatch)
    train_drafter(broken)
    weights = [load_file(RunFolder(recipe).drafter / "model.safetensors") for recipe in (half, broken, single)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert {tensor.dtype for tensor in weights[0].values()} == {torch.float32}
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_the_target_in_bf16_too(target_folder: Path) -> None:
    """Its products only: the loss is near that of fp32 features, not the same, and the folder knows."""
    exact = make_recipe(target_folder, "exact", max_steps=10, bf16=True)
    data = {"features": {"autocast": True}}
    near = Recipe.model_validate({**exact.model_dump(), "name": "near", "data": data})
    shutil.copytree(RunFolder(exact).data, RunFolder(near).data)
    losses = [train_drafter(recipe).loss for recipe in (exact, near)]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)
    with pytest.raises(UserError, match=r"begun with data\.features\.autocast = True, now it is None"):
        train_drafter(exact.model_copy(update={"name": "near"}))
