"""Spec-Bench's questions are fetched once, and a file with another hash is refused."""

import hashlib
import io
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.sources import questions as spec_bench
from draftsmith.data.sources.questions import load_questions, questions_file
from draftsmith.errors import UserError

LINE = b'{"question_id": 81, "category": "writing", "turns": ["One.", "Two."]}\n'


@pytest.fixture
def fetched_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the requested addresses; each response is one line with the expected hash."""
    addresses: list[str] = []

    def open_address(address: str, timeout: float) -> io.BytesIO:
        addresses.append(address)
        return io.BytesIO(LINE)

    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(spec_bench, "SHA256", hashlib.sha256(LINE).hexdigest())
    monkeypatch.setattr("urllib.request.urlopen", open_address)
    return addresses


def test_questions_are_fetched_once(fetched_addresses: list[str], tmp_path: Path) -> None:
    assert [question.turns for question in load_questions("spec_bench")] == [("One.", "Two.")]
    assert questions_file("spec_bench") == tmp_path / "spec_bench" / "question.jsonl"
    assert fetched_addresses == [spec_bench.URL]
    assert [entry.name for entry in (tmp_path / "spec_bench").iterdir()] == ["question.jsonl"]


def test_failed_fetch_is_reported(
    fetched_addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: str, timeout: float) -> Any:
        raise urllib.error.URLError("Name or service not known")

    way_out = f": fetch it elsewhere and name it as eval.questions, or put it at {tmp_path}/spec_bench/question.jsonl"
    monkeypatch.setattr(spec_bench, "SHA256", "0" * 64)
    with pytest.raises(UserError, match=f"is not Spec-Bench's question file .*{way_out}"):
        load_questions("spec_bench")
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(UserError, match=f"Name or service not known.*{way_out}"):
        load_questions("spec_bench")
    assert not (tmp_path / "spec_bench").exists()
