"""docs/guides/write-a-drafter.md: the drafter on the page, taken from it, trained and decoded with."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from support.places import ROOT
from support.tiny_runs import make_recipe
from transformers import AutoModelForCausalLM

import draftsmith.models.drafters
from draftsmith.eval.speculative_decoder import SpeculativeDecoder
from draftsmith.models.base import registry
from draftsmith.models.base.registry import load_drafter, load_drafter_class
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import MethodRecipe, Recipe
from draftsmith.train.drafter.stage import train_drafter

PAGE = (ROOT / "docs" / "guides" / "write-a-drafter.md").read_text(encoding="utf-8")
FILE, CHECK = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(RECIPE,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
KIND = "one_block"


@pytest.fixture
def in_the_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's file as if it lay in `models/drafters/`."""
    folder = tmp_path / "drafters"
    folder.mkdir()
    (folder / f"{KIND}.py").write_text(FILE, encoding="utf-8")
    kinds = registry.drafter_kinds()
    monkeypatch.setattr(registry, "drafter_kinds", lambda: [*kinds, KIND])
    monkeypatch.setattr(draftsmith.models.drafters, "__path__", [*draftsmith.models.drafters.__path__, str(folder)])
    importlib.invalidate_caches()
    yield
    sys.modules.pop(f"draftsmith.models.drafters.{KIND}", None)


@pytest.mark.usefixtures("in_the_house")
def test_it_is_trained_saved_loaded_and_changes_no_answer(target_folder: Path) -> None:
    written = Recipe.model_validate(yaml.safe_load(RECIPE))
    recipe = make_recipe(target_folder, KIND, max_steps=60, logging_steps=20, save_steps=60)
    # This target is random, so the rows' own labels are what can be learned of it.
    options = {**written.drafter.options, "loss": "ce"}
    recipe = recipe.model_copy(update={"drafter": written.drafter.model_copy(update={"options": options})})
    report = train_drafter(recipe)
    assert report.steps == 60
    history = registry.read_training(RunFolder(recipe).drafter).history
    losses = [entry["loss_depth2"] for entry in history if "loss_depth2" in entry]
    assert losses[-1] < 0.8 * losses[0]

    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float64)
    drafter = load_drafter(RunFolder(recipe).drafter, target)
    assert type(drafter).__name__ == "OneBlockDrafter"
    for tree in written.eval.methods:
        ours = SpeculativeDecoder(target, None, drafter, tree, max_length_tokens=60)
        plain = SpeculativeDecoder(target, None, max_length_tokens=60)
        with ours, plain:
            drafted, expected = (each.answer([5, 9, 33, 12, 7], 40) for each in (ours, plain))
        assert drafted.ids == expected.ids
        assert drafted.rounds <= expected.rounds


@pytest.mark.usefixtures("in_the_house")
def test_training_equals_decoding_as_the_page_says() -> None:
    exec(compile(CHECK, "write-a-drafter.md", "exec"), {})


@pytest.mark.usefixtures("in_the_house")
def test_the_check_finds_the_mistake_that_it_is_for(tmp_path: Path) -> None:
    """Decoding from h_t in place of h_{t-1}."""
    file = tmp_path / "drafters" / f"{KIND}.py"
    wrong = FILE.replace("previous_features(features.unsqueeze(0))[0, -1]", "features[-1]")
    assert wrong != FILE
    file.write_text(wrong, encoding="utf-8")
    with pytest.raises(AssertionError, match="not close"):
        exec(compile(CHECK, "write-a-drafter.md", "exec"), {})


@pytest.mark.usefixtures("in_the_house")
def test_its_recipe_is_one() -> None:
    recipe = Recipe.model_validate(yaml.safe_load(RECIPE))
    options = load_drafter_class(recipe.drafter.kind).config_class.Options.model_validate(recipe.drafter.options)
    assert options.num_depths == 4
    assert recipe.eval.methods[1] == MethodRecipe(name="tree", tree="best_first", nodes=12, branch=4)
