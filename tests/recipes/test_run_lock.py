"""A run's folder belongs to one process at a time; who died holds nothing."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import OWNER_FILE, alone_in_its_run, run_lock
from draftsmith.recipes.schema import Recipe

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
    """Another process that trains in `tmp_path/runs/mine`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "runs" / "mine")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


@alone_in_its_run("eval")
def stage(recipe: Recipe, answer: int) -> int:
    return answer


def test_the_other_process_is_named(
    tmp_path: Path, holder: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(name="mine", runs_dir=str(tmp_path / "runs"))
    with pytest.raises(UserError, match=rf"mine is in use by `draftsmith train` \(process {holder.pid} on .*`name`"):
        stage(recipe, 3)
    assert stage(recipe.model_copy(update={"name": "other"}), 3) == 3
    monkeypatch.setenv("RANK", "1")  # the second process of a training whose first one holds the lock
    assert stage(recipe, 3) == 3


def test_a_dead_process_holds_nothing(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    holder.kill()
    holder.wait()
    root = tmp_path / "runs" / "mine"
    assert (root / OWNER_FILE).is_file()  # it had no time to tidy up
    with run_lock(root, "eval"):
        assert '"eval"' in (root / OWNER_FILE).read_text()
    assert not (root / OWNER_FILE).exists()


def test_an_error_gives_it_back(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), run_lock(tmp_path, "tune"):
            raise KeyError
