"""Published sets are fetched once, at a pinned commit, and what is not them is refused."""

import hashlib
import io
import urllib.error
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from huggingface_hub import errors
from pyarrow import parquet

from draftsmith.data.sources.question_sets import GITHUB, HUB, NAMES, questions_file, set_name
from draftsmith.data.sources.questions import FORMATS, load_questions
from draftsmith.errors import UserError

LINE = b'{"question_id": 81, "category": "writing", "turns": ["One.", "Two."]}\n'


@pytest.fixture(params=["spec_bench", "mt_bench"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fetched_addresses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requested addresses; each gives one line, whose hash is the right one."""
    addresses: list[str] = []

    def open_address(address: str, timeout: float) -> io.BytesIO:
        addresses.append(address)
        return io.BytesIO(LINE)

    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setitem(GITHUB, name, (GITHUB[name][0], hashlib.sha256(LINE).hexdigest()))
    monkeypatch.setattr("urllib.request.urlopen", open_address)
    return addresses


def test_fetched_once(name: str, fetched_addresses: list[str], tmp_path: Path) -> None:
    """Both files count `writing` as MT-bench."""
    for _ in range(2):
        assert [(each.turns, each.task_name) for each in load_questions(name)] == [(("One.", "Two."), "mt_bench")]
    assert questions_file(name) == tmp_path / name / "question.jsonl"
    assert fetched_addresses == [GITHUB[name][0]]
    assert [entry.name for entry in (tmp_path / name).iterdir()] == ["question.jsonl"]


def test_a_failed_fetch_is_reported(
    name: str, fetched_addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: str, timeout: float) -> Any:
        raise urllib.error.URLError("Name or service not known")

    way_out = f": download it elsewhere and set eval.questions to it, or put it at {tmp_path}/{name}/question"
    monkeypatch.setitem(GITHUB, name, (GITHUB[name][0], "0" * 64))
    with pytest.raises(UserError, match=f"is not the pinned one of `{name}` .*{way_out}"):
        load_questions(name)
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(UserError, match=f"Name or service not known.*{way_out}"):
        load_questions(name)
    assert not (tmp_path / name).exists()


def test_a_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the pinned commit's file; a refusal is one sentence, with a way out."""
    requests: list[tuple[Any, ...]] = []

    def download(dataset: str, file: str, **keys: Any) -> str:
        requests.append((dataset, file, keys))
        copy = tmp_path / "copy.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([{"question": "How many?", "answer": "2\n#### 2"}]), copy)
        return str(copy)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert [(each.question_id, each.task_name) for each in load_questions("gsm8k")] == [(1, "gsm8k")]
    commit = "740312add88f781978c0658806c59bc2815b9866"
    keys = {"repo_type": "dataset", "revision": commit}
    assert requests == [("openai/gsm8k", "main/test-00000-of-00001.parquet", keys)]

    def refuse(*_: Any, **__: Any) -> str:
        raise errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(UserError, match=r"`gsm8k` cannot be fetched .*takes the path of a copy.*: OfflineMode"):
        load_questions("gsm8k")


def test_names() -> None:
    """A name stands for a set; a file's is that of the file, or of the folder that says more."""
    assert HUB.keys() <= {form.task for form in FORMATS}
    assert [set_name(each) for each in NAMES] == [*NAMES]
    files = ["/data/HumanEval.jsonl.gz", "speed/throughput_1k/test.parquet", "test.jsonl", "/data/q.v2.jsonl", "plain"]
    assert [set_name(each) for each in files] == ["HumanEval", "throughput_1k", "test", "q.v2", "plain"]
