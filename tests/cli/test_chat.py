"""`draftsmith chat`: equal answers with and without the drafter, history of turns, and Ctrl-C ends only an answer.

A question that begins with a path is no command.
"""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
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


def talk(recipe: str, tmp_path: Path, *messages: str) -> tuple[list[dict[str, Any]], str]:
    file = tmp_path / "said.json"
    command = ["chat", recipe, "--new-tokens", "16", f"--json={file}"]
    result = CliRunner().invoke(app, command, input="".join(f"{message}\n" for message in messages))
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text()), result.stdout


def test_with_and_without_the_drafter(recipe: str, tmp_path: Path) -> None:
    said, printed = talk(recipe, tmp_path, QUESTION, OTHER, "/reset", "/plain", QUESTION, OTHER, "/what", "/quit", "no")
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


def test_turn_reads_earlier_turns(recipe: str, tmp_path: Path) -> None:
    *_, after = talk(recipe, tmp_path, QUESTION, "What does it return?", OTHER)[0]
    (alone,) = talk(recipe, tmp_path, OTHER)[0]
    assert after["answer"] != alone["answer"]


def test_undecodable_line_does_not_end_the_chat(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Latin-1 terminal sends such bytes: Python keeps them as surrogates or raises."""

    def refused() -> str:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    lines = iter([lambda: "\udcff\udcfe hello", refused, lambda: QUESTION, lambda: "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines)())
    said, printed = talk(recipe, tmp_path)
    assert [each["question"] for each in said] == [QUESTION]
    assert printed.count("That line is not UTF-8") == 2


def test_ctrl_c_ends_only_the_answer(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, whole = [], chat.ColouredAnswer.add

    def interrupted(*arguments: Any) -> Any:
        shown.append(arguments)
        if len(shown) == 4:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(chat.ColouredAnswer, "add", interrupted)
    said, _ = talk(recipe, tmp_path, QUESTION, OTHER)
    assert [each["whole"] for each in said] == [False, True]
    assert 0 < said[0]["tokens"] < said[1]["tokens"]


def test_compilation_is_not_part_of_an_answers_time(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []
    answer = chat.Arm.answer

    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        asked.append((self.key, named.get("on_round") is not None))
        return answer(self, *arguments, **named)

    monkeypatch.setattr(chat.Arm, "answer", noted)
    talk(recipe, tmp_path, QUESTION)
    (plain, _), (drafting, _) = asked[:2]
    assert plain != drafting
    assert [seen for _, seen in asked] == [False, False, True]
    assert asked[2][0] == drafting


def test_pasted_text_is_one_message() -> None:
    """A terminal marks pasted text, and GNU readline then reads its line breaks as text."""
    code = (
        "import readline\nfrom draftsmith.cli import console\nconsole.paste_as_one_message()\n"
        "print('GNU' in readline.__doc__, repr(console.read_message()), flush=True)"
    )
    leader, follower = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower):
        os.close(follower)
        shown = b""
        while b"> " not in shown:
            shown += os.read(leader, 1024)
        os.write(leader, b"\x1b[200~one\rtwo\x1b[201~\r")
        while b"True 'one" not in shown and b"False 'one" not in shown:
            shown += os.read(leader, 1024)
        while not shown.endswith(b"\n"):
            shown += os.read(leader, 1024)
    os.close(leader)
    assert b"True 'one\\ntwo'" in shown or b"False 'one" in shown
