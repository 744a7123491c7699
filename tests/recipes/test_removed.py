"""What was removed from recipes is named, with what to use instead."""

from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.recipes import removed
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.removed import Removed, drop_unset


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "eval.old_key": Removed("use `eval.seed`", unset=(None, 3)),
        "drafter.kind=old_kind": Removed("use dflash2"),
        "recipe=old-recipe": Removed("use quickstart"),
    }
    monkeypatch.setattr(removed, "REMOVED", entries)


def test_removed_names_say_what_to_use() -> None:
    with pytest.raises(UserError, match=r"key `eval.old_key` was removed: use `eval.seed`"):
        load_recipe("quickstart", ["eval.old_key=7"])
    with pytest.raises(UserError, match=r"drafter.kind `old_kind` was removed: use dflash2"):
        load_drafter_class("old_kind")
    with pytest.raises(UserError, match=r"the recipe `old-recipe` was removed: use quickstart"):
        load_recipe("old-recipe")


def test_removed_keys_that_changed_nothing_are_dropped(tmp_path: Path) -> None:
    assert drop_unset({"eval": {"old_key": 3, "seed": 1}}) == {"eval": {"seed": 1}}
    file = tmp_path / "recipe.yaml"
    file.write_text("extends: quickstart\nname: resolved\neval: {old_key: 3}\n", encoding="utf-8")
    assert load_recipe(file).name == "resolved"


def test_removed_values_of_lists_say_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(removed.REMOVED, "eval.methods.tree=old", Removed("use chain"))
    with pytest.raises(UserError, match=r"key `eval.methods.0.tree`: `old` was removed: use chain"):
        load_recipe("quickstart", ["eval.methods=[{name: a, tree: old}]"])
