"""`--json` and `--quiet` at any place of the command line, and the output of each stream."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.finished_run import FinishedRun
from typer.testing import CliRunner

from draftsmith.cli import main as cli
from draftsmith.cli.console import heading, move_to_front
from draftsmith.recipes.schema import Recipe

RUNNER = CliRunner()
TRAIN = ["train", "quickstart"]


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `train` by a stub that prints and returns something."""

    def run_train(recipe: Recipe) -> dict[str, Any]:
        heading("2 train", recipe.name)
        return {"name": recipe.name, "loss": float("nan")}

    monkeypatch.setattr(cli, "run_train", run_train)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan a.yaml --json -q", "--json -q plan a.yaml"),
        ("plan a.yaml --json=x", "--json=x plan a.yaml"),  # an error there: it takes no file
        ("--quiet plan --json a.yaml", "--quiet --json plan a.yaml"),
        ("plan a.yaml -- --json", "plan a.yaml -- --json"),
    ],
)
def test_global_options_may_stand_anywhere(words: str, expected: str) -> None:
    assert move_to_front(words.split()) == expected.split()


@pytest.mark.usefixtures("fake_training")
def test_stdout_has_only_the_json() -> None:
    plain = RUNNER.invoke(cli.app, TRAIN)
    for arguments in ([*TRAIN, "--json"], ["--json", *TRAIN]):
        result = RUNNER.invoke(cli.app, arguments)
        assert result.exit_code == 0
        assert json.loads(result.stdout) == {"name": "quickstart", "loss": None}
        assert result.stderr == plain.stdout != ""  # for human readers
    assert RUNNER.invoke(cli.app, [*TRAIN, "-q"]).output == ""
    result = RUNNER.invoke(cli.app, ["--quiet", *TRAIN, "--json"])
    assert (json.loads(result.stdout)["name"], result.stderr) == ("quickstart", "")


def test_quiet_prints_errors() -> None:
    result = RUNNER.invoke(cli.app, ["plan", "gone.yaml", "--quiet", "--json"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: recipe file gone.yaml does not exist")


# The figures of each command on a finished run of eight conversations and two steps; push uses no network.
FIGURES: dict[str, Callable[[Any], bool]] = {
    "distill": lambda found: found["tokens"]["rows"] == found["conversations"]["already_done"] == 8,
    "features": lambda found: found["bytes"] > found["written_bytes"] == 0 < found["tokens"],
    "train": lambda found: found["steps"] == 2 and found["was_finished"] and len(found["accuracy_by_depth"]) > 1,
    "eval": lambda found: found["figures"]["rows"]["x@0"]["tau"] >= 1,
    "report": lambda found: found["figures"]["rows"]["x@0"]["tau"] >= 1,
    "run": lambda found: found["distill"] and found["train"]["steps"] == 2 and found["eval"]["figures"]["rows"],
    "doctor": lambda found: found["recipe"] == "run" and found["findings"][0]["severity"],
    "tune": lambda found: found["chosen"]["nodes"] > 0 and found["measured"][0]["tokens_per_s"] > 0,
    "prove": lambda found: found["holds"] and found["greedy"][0]["prompts"] == 2,
    "plan": lambda found: found["kept_bytes"] > 0,
    "push": lambda found: found["address"] is None and found["files_bytes"]["config.json"] > 100,
}


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("prove", "run", "tune") else name for name in FIGURES],
)
def test_every_command_writes_its_figures(finished: FinishedRun, command: str) -> None:
    result = finished.call(command, "--json", *(["--dry-run"] if command == "push" else []))
    assert result.exit_code == 0 or command == "doctor", result.stderr
    assert FIGURES[command](json.loads(result.stdout))
    assert result.stderr.strip()
    assert "\x1b" not in result.output


def test_every_command_is_tested() -> None:
    """Other tests cover bench, compare, export, import, init and `recipes`; the remaining commands are interactive."""
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert names == {*FIGURES, "bench", "compare", "export", "import", "init", "demo", "chat", "serve", "recipes"}
