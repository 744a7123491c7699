"""The recorded settings of a measurement, including defaults and draft models that the recipe does not state."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from draftsmith.cli.artifacts import measurement_settings
from draftsmith.recipes.schema import EvalRecipe, MethodConfig, Recipe


def with_method(kind: str, **options: object) -> Recipe:
    return Recipe(name="x", eval=EvalRecipe(methods=[MethodConfig(name="m", kind=kind, options=options)]))


def test_changed_draft_model_in_the_same_folder_is_detected(tmp_path: Path) -> None:
    recipes = with_method("draft_model", model=str(tmp_path)), with_method("specinfer", models=[str(tmp_path)])
    hashes = []
    for value in (0.0, 1.0):
        save_file({"weight": torch.full((4,), value)}, tmp_path / "model.safetensors")
        hashes.append([measurement_settings(recipe)["method_weights"] for recipe in recipes])
    assert hashes[0][0] == hashes[0][1] != hashes[1][0] == hashes[1][1]
