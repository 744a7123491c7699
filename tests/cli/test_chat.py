"""`draftsmith chat`: equal answers with and without the drafter, history of turns, and Ctrl-C ends only an answer.

A question that begins with a path is no command.
"""

import re
from typing import Any

import pytest
from support.tiny_runs import recipe_file, untrained_run
from typer.testing import CliRunner

from draftsmith.cli import chat
from draftsmith.cli.main import app

QUESTION, OTHER = "/tmp: what does os.path.join do?", "Show me an example."


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return recipe_file(untrained_run(tmp_path_factory.mktemp("chat")))


def talk(recipe: str, *messages: str) -> str:
    command = ["chat", recipe, "--new-tokens", "16"]
    result = CliRunner().invoke(app, command, input="".join(f"{message}\n" for message in messages))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_with_and_without_the_drafter(recipe: str) -> None:
    printed = talk(recipe, QUESTION, OTHER, "/reset", "/plain", QUESTION, OTHER, "/what", "/quit", "no")
    first, second, *plain = re.findall(r"^> (.+)\n16 tokens, (.*); cut at 16 tokens$", printed, re.MULTILINE)
    assert [answer for answer, _ in plain] == [first[0], second[0]]
    assert all(re.fullmatch(r"[\d.]+ tokens/s, [\d.]+ tokens per round", figures) for _, figures in (first, second))
    assert all(re.fullmatch(r"[\d.]+ tokens/s, without the drafter", figures) for _, figures in plain)
    assert printed.count("/reset: forget") == 2
    assert printed.count("a new conversation") == 1
    assert printed.count("Bold green") == 1
    assert "<|im_end|>" not in printed


def test_ctrl_c_ends_only_the_answer(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, whole = [], chat.ColouredAnswer.add

    def interrupted(*arguments: Any) -> Any:
        shown.append(arguments)
        if len(shown) == 4:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(chat.ColouredAnswer, "add", interrupted)
    printed = talk(recipe, QUESTION, OTHER)
    assert re.findall(r"^(\d+) tokens, (stopped)?", printed, re.MULTILINE) == [("4", "stopped"), ("16", "")]
