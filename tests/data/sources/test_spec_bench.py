"""Spec-Bench's questions are fetched once, and what is not them is refused."""

import hashlib
import io
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.sources import questions as spec_bench
from draftsmith.data.sources.questions import load_questions, questions_file
from draftsmith.recipes.errors import UserError

LINE = b'{"question_id": 81, "category": "writing", "turns": ["One.", "Two."]}\n'


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were asked for; each gives one line, whose hash is the right one."""
    addresses: list[str] = []

    def open_address(address: str, timeout: float) -> io.BytesIO:
        addresses.append(address)
        return io.BytesIO(LINE)

    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(spec_bench, "SHA256", hashlib.sha256(LINE).hexdigest())
    monkeypatch.setattr("urllib.request.urlopen", open_address)
    return addresses


def test_fetched_once(asked: list[str], tmp_path: Path) -> None:
    assert [question.turns for question in load_questions("spec_bench")] == [("One.", "Two.")]
    assert questions_file("spec_bench") == tmp_path / "spec_bench" / "question.jsonl"
    assert asked == [spec_bench.URL]
    assert [entry.name for entry in (tmp_path / "spec_bench").iterdir()] == ["question.jsonl"]


def test_another_file_is_refused(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_bench, "SHA256", "0" * 64)
    with pytest.raises(UserError, match="is not Spec-Bench's question file"):
        load_questions("spec_bench")
    assert not (tmp_path / "spec_bench").exists()


def test_without_a_network(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, timeout: float) -> Any:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(UserError) as caught:
        load_questions("spec_bench")
    sentence = str(caught.value)
    assert "Name or service not known" in sentence
    assert f"name it as eval.questions, or put it at {tmp_path}/spec_bench/question.jsonl" in sentence
    assert "\n" not in sentence
