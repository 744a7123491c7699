"""The command line: a user's mistake is one sentence on stderr and a non-zero exit, never a traceback."""

import importlib.metadata
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.places import ROOT
from typer.testing import CliRunner

from draftsmith.eval.commands import cli, export_commands
from draftsmith.recipes.errors import exit_with_one_sentence

RUNNER = CliRunner()


@pytest.mark.parametrize(
    "command", ["distill", "features", "train", "eval", "report", "run", "doctor", "plan", "compare"]
)
def test_a_missing_recipe_is_one_sentence_in_every_command(command: str) -> None:
    result = RUNNER.invoke(cli.app, [command, "no-such-recipe.yaml"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: recipe file no-such-recipe.yaml does not exist")
    assert result.stderr.count("\n") == 1


INTERRUPTED = "interrupted: run the same command again to continue where it stopped\n"


def test_ctrl_c_says_how_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_recipe", interrupted)
    result = RUNNER.invoke(cli.app, ["run", "quickstart"])
    assert result.exit_code == 130
    assert result.stderr == INTERRUPTED


@pytest.mark.parametrize(
    "command", [command.name or command.callback.__name__ for command in cli.app.registered_commands]
)
def test_sigterm_ends_every_command_as_ctrl_c_does(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a scheduler, `docker stop` or `kill`."""

    def terminated(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    for module in (cli, export_commands):
        monkeypatch.setattr(module, "load_recipe", terminated)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    result = RUNNER.invoke(cli.app, [command, "quickstart"])
    assert result.exit_code == 143
    assert result.stderr == INTERRUPTED
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_full_disk_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, exit_with_one_sentence():
        raise OSError(28, "No space left on device", "answers.jsonl")
    assert caught.value.code == 2
    assert "no space left on device: answers.jsonl" in capsys.readouterr().err


def test_the_launched_trainer_reports_the_same_way(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("evall: {}\nname: a\n")
    command = [sys.executable, str(ROOT / "train" / "train_parallel.py"), str(recipe)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == f"error: {recipe}: unknown key `evall`: did you mean `eval`?\n"


@pytest.mark.parametrize("name", ["../x", "a/b", "~", "a" * 300, "a\0b", ""])
def test_a_comparison_stays_below_runs_dir(name: str, tmp_path: Path) -> None:
    options = [f"runs_dir={tmp_path}/runs", "--name", name]
    result = RUNNER.invoke(cli.app, ["compare", "quickstart", "embedded-medusa", *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: option --name: must be at most 80 letters")
    assert not list(tmp_path.iterdir())


def test_what_comes_next_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my runs [/x]"
    folder.mkdir(parents=True)
    recipe = tmp_path / "it's.yaml"
    recipe.write_text("name: a\n")
    monkeypatch.setattr(cli, "run_train", lambda _: None)
    overrides = [f"runs_dir={folder}", "eval.temperatures=[0.0, 1.0]"]
    result = RUNNER.invoke(cli.app, ["train", str(recipe), *overrides])
    assert result.exit_code == 0
    next_line = result.stdout.splitlines()[-1].removeprefix("Next: ")
    assert shlex.split(next_line) == ["draftsmith", "eval", str(recipe), *overrides]


def test_a_file_of_figures_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell leaves the ~ of `--json=~/rows.json` to us."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    options = ["runs_dir=~/runs", "--peak-tflops=1", "--json=~/plans/plan.json"]
    result = RUNNER.invoke(cli.app, ["plan", "quickstart", *options])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "home" / "plans" / "plan.json").is_file()
    assert not list((tmp_path / "here").iterdir())


def test_the_version() -> None:
    result = RUNNER.invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"draftsmith {importlib.metadata.version('draftsmith')}\n")


def test_help_and_a_mistyped_recipe_wait_for_no_library() -> None:
    """They answer in half a second; torch and transformers alone take several."""
    code = (
        "import sys; from typer.testing import CliRunner; from draftsmith.eval.commands.cli import app\n"
        "for arguments in (['--help'], ['run', 'quikstart'], ['compare', 'quickstart', 'embeded']):\n"
        "    CliRunner().invoke(app, arguments)\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
