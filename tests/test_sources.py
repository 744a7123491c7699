"""Files plain and compressed, array and lines, the Hub, the limit, duplicates; and every way a source can be wrong."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import zstandard

from draftsmith.data.sources import SourceCounts, load_conversations
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe


def record(question: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "ä answer"}]}


def jsonl(*questions: str) -> str:
    return "".join(json.dumps(record(question), ensure_ascii=False) + "\n" for question in questions)


def questions(source: Path | str, counts: SourceCounts | None = None, **keys: Any) -> list[str]:
    return [c.turns[0].content for c in load_conversations(make_recipe(source, **keys), counts)]


def make_recipe(source: Path | str, engine: str = "transformers", **keys: Any) -> Recipe:
    data = {"conversations": {"source": str(source), **keys}, "distill": {"engine": engine}}
    return Recipe.model_validate({"name": "test", "data": data})


@pytest.mark.parametrize(
    "text", [jsonl("a", "b"), "\n" + jsonl("a") + "\n" + jsonl("b"), json.dumps([record("a"), record("b")])]
)
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_local_files(tmp_path: Path, text: str, suffix: str) -> None:
    compress = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    file = tmp_path / f"chats.json{suffix}"
    file.write_bytes(compress[suffix](text.encode()))
    assert questions(file) == ["a", "b"]


def test_limit_and_duplicates_and_skipped(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(jsonl("a", "a") + "{broken\n" + '{"messages": []}\n' + jsonl("b", "a", "c") + "{not reached\n")
    counts = SourceCounts()
    assert questions(file, counts, limit=3, skip_invalid=True) == ["a", "b", "c"]
    assert counts.duplicates == 2
    assert counts.invalid == {"not JSON": 1, "no turns": 1}


def test_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl("a").encode())
    assert questions(tmp_path / "chats.jsonl") == ["a"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", jsonl("a").encode() + b"{broken\n", "a.jsonl line 2: not JSON: "),
        ("a.json", f"[{json.dumps(record('a'))},\n{{broken]".encode(), "a.json line 2 is not JSON: "),
        ("a.jsonl", b"", "a.jsonl is empty: it must hold one JSON conversation a line"),
        ("a.jsonl", b" \n\n", "a.jsonl is empty"),
        ("a.json", b"[]", "a.json holds no valid conversation"),
        ("a.json", b'[{"messages": []}]', "a.json conversation 1: the conversation is empty"),
        ("a.jsonl", b"\xff\xfe\x00", "a.jsonl line 1: not UTF-8 text (byte 0xff at position 1)"),
        (
            "a.jsonl",
            jsonl("a").encode() + b'{"caf\xe9": 1}\n',
            "a.jsonl line 2: not UTF-8 text (byte 0xe9 at position 6)",
        ),
        ("a.json", b'[{"caf\xe9": 1}]', "a.json is not UTF-8 text: convert it"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz cannot be decompressed"),
        ("a.jsonl.gz", gzip.compress(jsonl("a").encode(), mtime=0)[:-12], "a.jsonl.gz cannot be decompressed"),
        ("a.jsonl.xz", b"not xz", "a.jsonl.xz cannot be decompressed"),
        ("a.jsonl.zst", b"not zstd", "a.jsonl.zst cannot be decompressed"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        questions(file)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_valid_counts_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n{"messages": []}\nnope\n')
    with pytest.raises(UserError, match=r"no valid conversation: 3 \(2 no turns, 1 not JSON\) skipped as invalid"):
        questions(tmp_path / "a.jsonl", skip_invalid=True)


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(jsonl("a"))
    with pytest.raises(UserError, match=r"chat\.jsonl does not exist: did you mean .*chats\.jsonl\?"):
        questions(tmp_path / "chat.jsonl")
    with pytest.raises(UserError, match=r"its folder .* does not exist either"):
        questions(tmp_path / "nowhere" / "chat.jsonl")
    with pytest.raises(UserError, match="is a folder: name one"):
        questions(tmp_path)


@pytest.mark.parametrize(
    "prompt", [{"prompt": "a"}, {"turns": ["a", "b"]}, {"messages": [{"role": "user", "content": "a"}]}]
)
def test_prompts_are_for_self_distillation_alone(tmp_path: Path, prompt: dict[str, Any]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(prompt) + "\n" + jsonl("c"))
    assert questions(file) == ["a", "c"]
    with pytest.raises(UserError, match=r"prompts\.jsonl line 1: a question has no answer, and with .*engine: none"):
        questions(file, engine="none")
    counts = SourceCounts()
    assert questions(file, counts, engine="none", skip_invalid=True) == ["c"]
    assert counts.invalid == {"no answer": 1}


def test_hub_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(name: str, **keys: Any) -> list[dict[str, Any]]:
        asked.update(keys, name=name)
        return [record("a"), {"conversations": []}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert questions("someone/chats", hub_split="test", revision="abc", limit=1) == ["a"]
    assert asked == {"name": "someone/chats", "data_files": None, "revision": "abc", "split": "test"}
    with pytest.raises(UserError, match="someone/chats row 2: the conversation is empty"):
        questions("someone/chats")


def test_hub_json_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text(json.dumps([record("a") | {"id": 1}, record("b") | {"id": "mixed types"}]))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file, **keys: str(tmp_path / file))
    assert questions("someone/chats", file="dump.json") == ["a", "b"]


def test_hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, **keys: Any) -> None:
        raise ConnectionError(f"Couldn't reach '{name}'\non the Hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(
        UserError, match=r"Hub dataset someone/chats \(split train\) cannot be loaded: Couldn't"
    ) as caught:
        questions("someone/chats")
    assert "set data.conversations.source to a local file" in str(caught.value)
    assert "\n" not in str(caught.value)
