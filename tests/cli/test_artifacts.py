"""The recorded settings of a measurement, including defaults and draft models that the recipe does not state."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.cli import artifacts
from draftsmith.cli.artifacts import measurement_settings
from draftsmith.errors import UserError
from draftsmith.recipes.schema import EvalRecipe, MethodConfig, Recipe


def with_method(kind: str, **options: object) -> Recipe:
    return Recipe(name="x", eval=EvalRecipe(methods=[MethodConfig(name="m", kind=kind, options=options)]))


def test_defaults_are_recorded() -> None:
    """A later version with another default makes another measurement."""
    short, long = (measurement_settings(with_method("prompt_lookup", **each)) for each in ({}, {"num_tokens": 10}))
    assert short == long
    assert short["eval"]["methods"][0]["options"]["num_tokens"] == 10


@pytest.mark.parametrize("compiles", [False, True])
def test_compilation_is_recorded(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    """The default depends on the machine: a measurement is not resumed on a machine with the other default."""
    monkeypatch.setattr(artifacts, "compiles", lambda _: compiles)
    assert measurement_settings(Recipe(name="x"))["eval"]["compile"] is compiles


def test_changed_draft_model_in_the_same_folder_is_detected(tmp_path: Path) -> None:
    recipes = with_method("draft_model", model=str(tmp_path)), with_method("specinfer", models=[str(tmp_path)])
    hashes = []
    for value in (0.0, 1.0):
        save_file({"weight": torch.full((4,), value)}, tmp_path / "model.safetensors")
        hashes.append([measurement_settings(recipe)["method_weights"] for recipe in recipes])
    assert hashes[0][0] == hashes[0][1] != hashes[1][0] == hashes[1][1]


def test_invalid_method_is_reported_before_loading_models() -> None:
    with pytest.raises(UserError, match="`lookup` does not exist"):
        measurement_settings(with_method("lookup"))
    with pytest.raises(UserError, match=r"unknown key `options\.tokens`"):
        measurement_settings(with_method("prompt_lookup", tokens=3))
