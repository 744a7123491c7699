"""The command line: a user's mistake is one sentence on stderr and a non-zero exit code, never a traceback."""

import json
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

from draftsmith.cli import main as cli
from draftsmith.cli import stages
from draftsmith.errors import INTERRUPTED
from draftsmith.models.base.registry import Training
from draftsmith.recipes.removed import REMOVED

RUNNER = CliRunner()
NO_RECIPE = {"demo", "init", "recipes"}
COMMANDS = sorted({each.name or each.callback.__name__ for each in cli.app.registered_commands} - NO_RECIPE)


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_recipe_is_one_sentence(command: str) -> None:
    needed = {"import": ["--from", "checkpoint"], "bench": ["--engine", "vllm"]}.get(command, [])
    result = RUNNER.invoke(cli.app, [command, "no-such-recipe.yaml", *needed])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: recipe file no-such-recipe.yaml does not exist")


@pytest.mark.parametrize("removed", [key for key in REMOVED if " --" in key])
def test_removed_option_names_what_to_use(removed: str) -> None:
    command, option = removed.split()
    result = RUNNER.invoke(cli.app, [command, "quickstart", f"{option}=1"])
    assert (result.exit_code, result.stderr) == (2, f"error: `{removed}` was removed: {REMOVED[removed].instead}\n")


def test_sigterm_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from a scheduler, `docker stop` or `kill`; `test_interrupted_eval.py` has Ctrl-C."""

    def terminated(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(cli, "load_recipe", terminated)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    result = RUNNER.invoke(cli.app, ["run", "quickstart"])
    assert (result.exit_code, result.stderr) == (143, f"{INTERRUPTED}\n")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_shipped_recipes_are_listed_one_per_line() -> None:
    result = RUNNER.invoke(cli.app, ["recipes", "--json"])
    listed = json.loads(result.stdout)
    assert [*listed] == sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml"))
    assert listed["qwen3-8b-dspark"].endswith("for Qwen3-8B on one node of 80 GB GPUs, for vLLM, SGLang and llama.cpp")
    assert all(20 < len(summary) <= 150 for summary in listed.values())
    assert f"{'quickstart'.ljust(max(map(len, listed)))}  {listed['quickstart']}\n" in result.stderr
    result = RUNNER.invoke(cli.app, ["recipes", "show", "quickstart", "drafter.kind=eagle", "--json"])
    shown = json.loads(result.stdout)
    assert (shown["name"], shown["drafter"]["options"]["class_weight"]) == ("quickstart-eagle", 0.1)
    assert "\n    fc_bias: false\n" in result.stderr
    assert RUNNER.invoke(cli.app, ["recipes", "list"]).exit_code == 2


def test_next_command_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "it's.yaml"
    recipe.write_text("name: a\n")
    monkeypatch.setattr(cli, "run_train", lambda _: {"steps": 1})
    overrides = [f"runs_dir={tmp_path}/my runs [/x]", "eval.temperatures=[0.0, 1.0]"]
    result = RUNNER.invoke(cli.app, ["train", str(recipe), *overrides])
    assert result.exit_code == 0, result.output
    next_line = result.stdout.splitlines()[-1].removeprefix("Next: ")
    assert shlex.split(next_line) == ["draftsmith", "eval", str(recipe), *overrides]
    # `make` runs the program out of its environment's folder, where the shell finds no `draftsmith`.
    monkeypatch.setattr(sys, "argv", [".venv/bin/draftsmith"])
    monkeypatch.setenv("PATH", str(tmp_path))
    result = RUNNER.invoke(cli.app, ["train", str(recipe)])
    assert shlex.split(result.stdout.splitlines()[-1]) == ["Next:", ".venv/bin/draftsmith", "eval", str(recipe)]


def test_help_and_a_mistyped_recipe_import_no_large_library() -> None:
    """They take half a second; importing torch and transformers takes several."""
    code = (
        "import sys; from typer.testing import CliRunner; from draftsmith.cli.main import app\n"
        "for arguments in (['--help'], ['run', 'quikstart'], ['compare', 'quickstart', 'embeded']):\n"
        "    CliRunner().invoke(app, arguments)\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("code", [0, 3])
def test_processes_are_launched(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch` trains; a failure's exit code is the command's."""
    launched: list[list[str]] = []

    class Launched(subprocess.Popen[bytes]):
        def __init__(self, command: list[str]) -> None:
            launched.append(command)
            super().__init__([sys.executable, "-c", f"raise SystemExit({code})"])

    monkeypatch.setattr(stages.subprocess, "Popen", Launched)
    monkeypatch.setattr("draftsmith.train.drafter.report.read_training", lambda _: Training(steps=2, history=[]))
    result = RUNNER.invoke(cli.app, ["train", "quickstart", "train.max_steps=2", "--processes", "2"])
    assert (result.exit_code, "Next: " in result.stdout) == (code, code == 0)
    (command,) = launched
    number = command.index("--num_processes")
    words = ["2", "-m", "draftsmith.train.train_parallel", "quickstart", "train.max_steps=2"]
    assert command[number + 1 :] == words
    assert command[number - 1].endswith(("accelerate/cpu_x2.yaml", "accelerate/multi_gpu.yaml"))
    assert ("no GPU: 2 processes share" in result.stdout) == command[number - 1].endswith("cpu_x2.yaml")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = RUNNER.invoke(cli.app, ["train", "quickstart", "--processes", "2"])
    assert (result.exit_code, "unset WORLD_SIZE=2, or leave it out" in result.stderr) == (2, True)


def test_a_failed_launch_ends_with_the_code_of_its_process(tmp_path: Path) -> None:
    """The user reads what the processes say, and no traceback of the launcher."""
    (tmp_path / "fails.py").write_text("import sys\nprint('error: no data', file=sys.stderr)\nsys.exit(2)\n")
    config = stages.shipped_folder() / "accelerate" / "cpu_x2.yaml"
    options = ["--config_file", str(config), "--main_process_port", "0", str(tmp_path / "fails.py")]
    command = [sys.executable, "-m", "draftsmith.train.processes.launcher", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, "error: no data" in result.stderr, "Traceback" in result.stderr) == (2, True, False)
