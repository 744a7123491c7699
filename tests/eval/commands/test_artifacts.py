"""What a measurement depends on: defaults and draft models too, which no recipe spells out."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.errors import UserError
from draftsmith.eval.commands import artifacts
from draftsmith.eval.commands.artifacts import measurement_settings
from draftsmith.recipes.schema import EvalRecipe, MethodConfig, Recipe


def with_method(kind: str, **options: object) -> Recipe:
    return Recipe(name="x", eval=EvalRecipe(methods=[MethodConfig(name="m", kind=kind, options=options)]))


def test_defaults_are_written_out() -> None:
    """A default of a later version is another measurement."""
    short, long = (measurement_settings(with_method("prompt_lookup", **each)) for each in ({}, {"num_tokens": 10}))
    assert short == long
    assert short["eval"]["methods"][0]["options"]["num_tokens"] == 10


@pytest.mark.parametrize("compiles", [False, True])
def test_whether_it_was_compiled_is_written_out(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    """A default that depends on the machine is recorded: records of one are not continued on the other."""
    monkeypatch.setattr(artifacts, "compiles", lambda _: compiles)
    assert measurement_settings(Recipe(name="x"))["eval"]["compile"] is compiles


def test_another_draft_model_in_the_same_folder(tmp_path: Path) -> None:
    recipes = with_method("draft_model", model=str(tmp_path)), with_method("specinfer", models=[str(tmp_path)])
    hashes = []
    for value in (0.0, 1.0):
        save_file({"weight": torch.full((4,), value)}, tmp_path / "model.safetensors")
        hashes.append([measurement_settings(recipe)["method_weights"] for recipe in recipes])
    assert hashes[0][0] == hashes[0][1] != hashes[1][0] == hashes[1][1]


def test_a_wrong_method_is_found_before_any_model_is_loaded() -> None:
    with pytest.raises(UserError, match="`lookup` does not exist"):
        measurement_settings(with_method("lookup"))
    with pytest.raises(UserError, match=r"unknown key `options\.tokens`"):
        measurement_settings(with_method("prompt_lookup", tokens=3))
