"""The drafter's model card: metadata for the Hub, nothing local to this machine, and no overwritten user text."""

import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from support.finished_run import FinishedRun

from draftsmith.models.base.registry import drafter_kinds
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import Recipe, TargetRecipe
from draftsmith.train.drafter.model_card import front_matter, write_drafter_card

FIGURES: dict[str, Any] = {
    "rows": [
        {"method": "tree", "temperature": 0.0, "tau": 2.5, "tau_without_bonus": 1.5, "speedup_mean": 1.4,
         "speedup_std": 0.03},
        {"method": "tree", "temperature": 1.0, "tau": 2.1, "tau_without_bonus": 1.2, "speedup_mean": 1.2,
         "speedup_std": None},
    ],
    "questions": "21 questions of `embedded.jsonl`",
    "machine": "x86_64, 2 CPUs",
    "command": "draftsmith run quickstart",
}  # fmt: skip


def make_recipe(folder: Path, name: str = "quickstart", **changes: str) -> Recipe:
    return load_recipe(name, [f"runs_dir={folder}", *(f"{key}={value}" for key, value in changes.items())])


def test_metadata_names_target_and_data(tmp_path: Path) -> None:
    """Only a target and data on the Hub are named, not local ones."""
    hub = front_matter(make_recipe(tmp_path, "llama3-8b-parallel"))
    assert hub["library_name"] == "draftsmith"
    assert hub["pipeline_tag"] == "text-generation"
    assert hub["base_model"].count("/") == 1
    assert hub["tags"] == [
        *["speculative-decoding", "draft-model", "drafter", "draftsmith", "parallel", "arxiv:2410.05589"]
    ]
    here = front_matter(make_recipe(tmp_path))
    assert "base_model" not in here
    assert "datasets" not in here


def test_every_kind_has_a_card(tmp_path: Path) -> None:
    for kind in drafter_kinds():
        recipe = Recipe.model_validate({"name": "mine", "runs_dir": str(tmp_path), "drafter": {"kind": kind}})
        file = write_drafter_card(recipe)
        assert file == tmp_path / "mine" / "drafter" / "README.md"
        card = ModelCard.load(file)
        assert kind.replace("_", "-") in card.data.tags
        assert card.text.strip().startswith("<!--")
        assert "# mine: a drafter for embedded" in card.text
        assert ".py`" not in card.text
        assert "{" not in card.text.split("## Training")[0].split("## Use")[0]
        assert "## Measured" not in card.text
        assert "## Is it lossless?" not in card.text


def test_cost_of_the_draft_vocabulary(tmp_path: Path) -> None:
    rows = [dict(row) for row in FIGURES["rows"]]
    rows[1] |= {"decoded_coverage": 0.962, "rounds_ended_outside": 0.0714, "tau_lost_at_most": 0.126}
    file = write_drafter_card(make_recipe(tmp_path), {**FIGURES, "rows": rows})
    assert file is not None
    text = " ".join(file.read_text().split())
    assert "tree at T = 1: 96.2% of the tokens that its rounds kept are in its draft vocabulary; 7.1% of the" in text
    assert "which cost at most 0.13 of tau" in text
    assert text.count("draft vocabulary") == 1


def test_code_loads_the_target_as_the_recipe_does(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    target = {"model": "org/llm", "revision": "v2", "chat_template_kwargs": {"enable_thinking": False}}
    file = write_drafter_card(recipe.model_copy(update={"target": TargetRecipe.model_validate(target)}))
    assert file is not None
    loaded = 'load_target("org/llm", revision="v2", chat_template_kwargs={\'enable_thinking\': False})'
    assert loaded in file.read_text()


def test_local_folders_are_not_published(tmp_path: Path) -> None:
    (tmp_path / "my-target").mkdir()
    conversations = tmp_path / "talk.jsonl"
    conversations.write_text("")
    changes = {"target.model": str(tmp_path / "my-target"), "data.conversations.source": str(conversations)}
    file = write_drafter_card(make_recipe(tmp_path, **changes))
    assert file is not None
    text = file.read_text()
    assert str(tmp_path) not in text
    assert "base_model" not in text
    assert "a drafter for my-target" in text
    assert "Conversations of `talk.jsonl`" in text


def test_python_code_of_the_card_runs(finished: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Insert this machine's folders, which a card leaves out, and run the code."""
    card = (finished.root / "drafter" / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
    code = re.sub(r'load_target\("[^"]*"', f'load_target("{finished.folder / "target"}"', code)
    code = code.replace("owner/this-drafter", str(finished.root / "drafter")).replace(
        '"What does os.path.join do?"', '"w5 w6 w7", 8'
    )
    exec(compile(code, "card", "exec"), {})
    assert capsys.readouterr().out.strip()
