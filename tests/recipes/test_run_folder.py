"""A run folder belongs to one process at a time, and resumes only with its initial settings."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.errors import UserError
from draftsmith.files import file_sha256, write_json
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import (
    OWNER_FILE,
    TEMPLATE_DATE,
    RunFolder,
    as_distilled,
    check_settings,
    run_lock,
    with_recorded_date,
    with_run_lock,
)
from draftsmith.recipes.schema import Recipe


def test_run_folder_records_recipe_and_provenance(tmp_path: Path) -> None:
    recipe = Recipe(name="a", runs_dir=str(tmp_path / "runs"))
    folder = RunFolder(recipe)
    assert not folder.root.exists()
    source = tmp_path / "mine.yaml"
    source.write_text("name: a")
    folder.record("distill")
    folder.record("train", {"recipe": source})
    assert load_recipe(folder.root / "recipe.yaml") == recipe
    stages = yaml.safe_load((folder.root / "provenance.json").read_text())
    assert list(stages) == ["distill", "train"]
    assert stages["train"]["inputs_sha256"] == {"recipe": file_sha256(source)}
    assert {"python", "torch", "transformers"} <= set(stages["train"]["versions"])


HOLDER = """
import sys
from pathlib import Path
from draftsmith.recipes.run_folder import run_lock

with run_lock(Path(sys.argv[1]), "train"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start another process that trains in `tmp_path/runs/mine`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "runs" / "mine")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


@with_run_lock("eval")
def stage(recipe: Recipe, answer: int) -> int:
    return answer


def test_lock_error_names_the_other_process(
    tmp_path: Path, holder: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(name="mine", runs_dir=str(tmp_path / "runs"))
    with pytest.raises(UserError, match=rf"mine is in use by `draftsmith train` \(process {holder.pid} on .*`name`"):
        stage(recipe, 3)
    assert stage(recipe.model_copy(update={"name": "other"}), 3) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")  # the second process of a training whose first one holds the lock
    assert stage(recipe, 3) == 3
    for rank, message in (
        ("one", "is not a number from 0 on: unset RANK, or start"),
        ("2", "is not below WORLD_SIZE=2"),
    ):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UserError, match=f"RANK={rank} in the environment {message}"):
            stage(recipe, 3)


def test_dead_process_releases_the_lock(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    holder.kill()
    holder.wait()
    root = tmp_path / "runs" / "mine"
    assert (root / OWNER_FILE).is_file()  # it had no time to clean up
    with run_lock(root, "eval"):
        assert '"eval"' in (root / OWNER_FILE).read_text()
    assert not (root / OWNER_FILE).exists()


def test_error_releases_the_lock(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), run_lock(tmp_path, "tune"):
            raise KeyError


SETTINGS: dict[str, Any] = {
    "eval": {"max_new_tokens": 10, "stop": [], "methods": [{"name": "a"}]},
    "drafter_weights": ["12ab"],
    "data.max_length_tokens": 512,
}
WAY_OUT = "restore the key, give the recipe another `name`, or delete that folder to measure again"


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (
            {"eval": {"max_new_tokens": 20, "stop": [], "methods": [{"name": "a"}]}, "drafter_weights": ["34cd"]},
            "eval.max_new_tokens = 10, now it is 20 (drafter_weights changed too)",
        ),
        (
            {"eval": {"max_new_tokens": 10, "stop": ["x"], "methods": [{"name": "b"}]}},
            "eval.stop = [], now it is ['x'] (eval.methods.0.name changed too)",
        ),
        (
            {"eval": {"max_new_tokens": 10, "stop": [], "methods": [{"name": "a"}, {"name": "b"}]}},
            "eval.methods.1.name = None, now it is 'b'",
        ),
        ({"eval": {"max_new_tokens": 10, "stop": []}}, "eval.methods.0.name = 'a', now it is None"),
        ({"seed": 1}, "seed = None, now it is 1"),
        ({"data.max_length_tokens": 1024}, "data.max_length_tokens = 512, now it is 1024"),
    ],
)
def test_changed_settings_are_refused(tmp_path: Path, changed: dict[str, Any], difference: str) -> None:
    file = tmp_path / "settings.json"
    check_settings(file, SETTINGS, "measure again")  # no stage has started
    write_json(file, SETTINGS)
    check_settings(file, SETTINGS, "measure again")
    check_settings(file, SETTINGS | {"data.max_length_tokens": 8}, "measure again", ["data.max_length_tokens"])
    with pytest.raises(UserError) as caught:
        check_settings(file, SETTINGS | changed, "measure again", ["data.max_length_tokens"])
    assert str(caught.value) == f"{tmp_path} was started with {difference}: {WAY_OUT}"


def test_key_that_may_decrease_must_not_disappear(tmp_path: Path) -> None:
    write_json(tmp_path / "settings.json", SETTINGS)
    without = {key: value for key, value in SETTINGS.items() if key != "data.max_length_tokens"}
    with pytest.raises(UserError, match=r"data.max_length_tokens = 512, now it is None"):
        check_settings(tmp_path / "settings.json", without, "distil again", ["data.max_length_tokens"])


def test_what_was_distilled_decides(tmp_path: Path) -> None:
    """Later stages and the card say what the data were; a date in the prompts is that of the first answers."""
    recipe = Recipe.model_validate({"name": "r", "runs_dir": str(tmp_path), "data": {"distill": {"temperature": 1.0}}})
    assert as_distilled(recipe) == (recipe, "")
    assert with_recorded_date(recipe) is recipe
    conversations = {key: value for key, value in recipe.data.conversations.model_dump().items() if key != "mixture"}
    settings = {f"data.conversations.{key}": value for key, value in conversations.items()}
    settings["data.conversations.filters"] = {"languages": [], "max_turns": None}  # of the release before
    settings |= {"data.distill.temperature": 0.0, "data.distill.cut_answers": "drop", "seed": 3}
    write_json(RunFolder(recipe).data / "distill_settings.json", settings | {TEMPLATE_DATE: "2026-03-01"})
    decided, sentence = as_distilled(recipe)
    assert (decided.data.distill.temperature, decided.data.distill.cut_answers) == (0.0, "drop")
    assert sentence.endswith("with data.distill.temperature = 0.0, which replaces this recipe's settings")
    assert as_distilled(decided) == (decided, "")
    assert with_recorded_date(recipe).target.template_date == "2026-03-01"
    named = recipe.model_copy(update={"target": recipe.target.model_copy(update={"template_date": "2026-05-05"})})
    assert with_recorded_date(named) is named
