"""`draftsmith chat`: equal answers with and without the drafter, history of turns, and Ctrl-C ends only an answer.

A question that begins with a path is no command.
"""

import json
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


def talk(recipe: str, *messages: str) -> tuple[list[dict[str, Any]], str]:
    command = ["chat", recipe, "--new-tokens", "16", "--json"]
    result = CliRunner().invoke(app, command, input="".join(f"{message}\n" for message in messages))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_with_and_without_the_drafter(recipe: str) -> None:
    said, printed = talk(recipe, QUESTION, OTHER, "/reset", "/plain", QUESTION, OTHER, "/what", "/quit", "no")
    assert [each["question"] for each in said] == [QUESTION, OTHER, QUESTION, OTHER]
    assert [each["drafted"] for each in said] == [True, True, False, False]
    assert said[0]["answer"] == said[2]["answer"]
    assert said[1]["answer"] == said[3]["answer"]
    assert [each["tau"] for each in said[2:]] == [1.0, 1.0]
    for each in said:
        # This target generates a special token within an answer.
        assert " ".join(each["answer"].split()) in " ".join(printed.replace("<|user|>", "").split())
        assert each["whole"]
        assert each["tokens"] <= 16
    assert "16 tokens, " in printed
    assert printed.count("/reset: forget") == 2
    assert printed.count("a new conversation") == 1
    assert printed.count("Bold green") == 1
    assert [each["cut_at"] for each in said] == [16 if each["tokens"] == 16 else None for each in said]
    assert printed.count("; cut at 16 tokens") == sum(each["cut_at"] is not None for each in said)
    assert "<|im_end|>" not in printed


def test_ctrl_c_ends_only_the_answer(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, whole = [], chat.ColouredAnswer.add

    def interrupted(*arguments: Any) -> Any:
        shown.append(arguments)
        if len(shown) == 4:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(chat.ColouredAnswer, "add", interrupted)
    said, _ = talk(recipe, QUESTION, OTHER)
    assert [each["whole"] for each in said] == [False, True]
    assert 0 < said[0]["tokens"] < said[1]["tokens"]
