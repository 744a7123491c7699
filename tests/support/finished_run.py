"""A run of a tiny target that went through all stages, for tests that damage and rerun it."""

import json
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.tiny_runs import recipe_file, recipe_in, save_target
from typer.testing import CliRunner

from draftsmith.cli.artifacts import write_tuned
from draftsmith.cli.console import console
from draftsmith.cli.main import app
from draftsmith.recipes.schema import MethodConfig

LONGEST_S = 120.0  # for a command; a run takes a second or two on an idle machine


class Hangs(BaseException):
    """Exception that no `except Exception` catches."""


@dataclass
class FinishedRun:
    """`folder` holds the inputs, `target/` and `runs/run/`; `whole` is a copy of it."""

    folder: Path
    whole: Path
    recipe: str

    @property
    def root(self) -> Path:
        return self.folder / "runs" / "run"

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.whole, self.folder)

    def call(self, command: str, *arguments: str) -> Result:
        """Run a command in this process, ended if it hangs."""
        console._buffer.clear()  # from a command that failed while printing

        def hangs(*_: Any) -> None:
            raise Hangs

        before = signal.signal(signal.SIGALRM, hangs)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
        try:
            return CliRunner().invoke(app, [command, self.recipe, *LIGHT.get(command, []), *arguments])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def done(self, command: str, *arguments: str) -> Result:
        """Run a command that must succeed."""
        result = self.call(command, *arguments)
        assert result.exit_code == 0, (command, result.output, result.exception)
        return result

    def error(self, command: str, *arguments: str) -> str:
        """Run a command that must fail by a user's mistake; return its one sentence."""
        result = self.call(command, *arguments)
        assert result.exit_code == 2, (result.output, result.exception)
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in result.output
        return line


LIGHT = {
    "tune": ["--questions", "2", "--new-tokens", "8", "--turns", "1"],
    "prove": ["--prompts", "2", "--samples", "1", "--new-tokens", "8"],
    "plan": ["--peak-tflops", "1", "--memory-gb-per-s", "1"],
}


def finished_run(parent: Path) -> FinishedRun:
    """Build a run with given conversations, two training steps, two measured questions, a proof, features on disk."""
    folder, whole = parent / "run", parent / "whole"
    save_target(folder / "target")
    answers = ["w8 w9 w10 w11 w12 w13", "w15 w16 w17 w18"]
    talks = [
        [("human", f"w{5 + n} w6 w7"), ("gpt", answers[0]), ("human", "w9 w14"), ("gpt", answers[1])] for n in range(8)
    ]
    write_lines(folder / "chats.jsonl", [{"conversations": [{"from": who, "value": w} for who, w in t]} for t in talks])
    questions = [(1, "writing", ["w5 w6 w7", "w8 w9"]), (2, "math", ["w20 w21"])]
    conversations = {"source": str(folder / "chats.jsonl"), "decontaminate": []}
    asked = write_questions(folder / "questions.jsonl", questions)
    recipe = recipe_in(
        folder,
        data={
            "conversations": conversations, "distill": {"engine": "none"}, "max_length_tokens": 64,
            "tokenize_processes": 1,
        },
        train={"max_steps": 2, "save_steps": 1},
        eval={
            "questions": asked, "max_new_tokens": 8, "runs": 1, "warmup_questions": 0,
            "methods": [{"name": "tuned", "tree": "tuned"}, {"name": "x", "kind": "prompt_lookup"}],
        },
    )  # fmt: skip
    run = FinishedRun(folder, whole, recipe_file(recipe))
    for command in ("distill", "train", "prove", "eval", "features"):
        run.done(command)
        if command == "train":
            write_tuned(run.root / "drafter", MethodConfig(name="x", tree="best_first", nodes=3))
    shutil.copytree(folder, whole)
    return run


def write_questions(file: Path, questions: Sequence[tuple[int, str, list[str]]]) -> str:
    """Write questions, each with its number, category and turns."""
    keys = ("question_id", "category", "turns")
    write_lines(file, [dict(zip(keys, each, strict=True)) for each in questions])
    return str(file)


def write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return finished_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def finished(finished_once: FinishedRun) -> FinishedRun:
    """Return the run restored to its finished state."""
    finished_once.restore()
    return finished_once
