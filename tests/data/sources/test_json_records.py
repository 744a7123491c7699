"""Arrays and lines as streams: chunk borders, line numbers, what is left behind an array, memory."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.sources import json_records
from draftsmith.data.sources.conversation import InvalidConversation
from draftsmith.data.sources.json_records import read_json_records
from draftsmith.recipes.errors import UserError

VALUES: list[Any] = [{"a": "ä" * 9, "b": [1, {}]}, 1234567, -1.5e3, "]", None, [[], '\\"'], {}, "€", 12]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_an_array_is_the_same_wherever_chunks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, layout: dict[str, Any]
) -> None:
    monkeypatch.setattr(json_records, "CHUNK_BYTES", chunk_bytes)
    file = tmp_path / "a.json"
    file.write_text("\n \n" + json.dumps(VALUES, **layout) + " \n\n", encoding="utf-8")
    assert list(read_json_records(file)) == [(f"{file} conversation {n}", v) for n, v in enumerate(VALUES, start=1)]


@pytest.mark.parametrize("chunk_bytes", [1, 5, 1 << 20])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1,\n2\n3]", "line 3 is not JSON: a comma or ] is missing"),
        ("\n[1,\n{]", "line 3 is not JSON: Expecting property name"),
        ("[1,\n2]\n[3]", "line 3 is not JSON: there is text behind the array"),
        ("[1,\n2", "line 2 is not JSON: a comma or ] is missing"),
        ('[1,\n"ab', "line 2 is not JSON: Unterminated string"),
        ("[1,]", "line 1 is not JSON: Expecting value"),
        ("[", "line 1 is not JSON: Expecting value"),
    ],
)
def test_a_broken_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, text: str, sentence: str
) -> None:
    monkeypatch.setattr(json_records, "CHUNK_BYTES", chunk_bytes)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError) as caught:
        list(read_json_records(tmp_path / "a.json"))
    assert f"a.json {sentence}" in str(caught.value)


def test_lines_that_are_no_records_stand_in_their_place(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\n{"a": 1}\r\n\xff\n{\n"\xe2\x80\xa8"')  # U+2028 ends no line of JSON lines
    found = list(read_json_records(file))
    assert [where for where, _ in found] == [f"{file} line {n}" for n in (2, 3, 4, 5)]
    assert found[0][1] == {"a": 1}
    assert [error.reason for _, error in found[1:3] if isinstance(error, InvalidConversation)] == [
        "not UTF-8",
        "not JSON",
    ]
    assert found[3][1] == "\u2028"


@pytest.mark.parametrize("form", ["array", "lines"])
def test_a_large_file_is_never_in_memory(tmp_path: Path, form: str) -> None:
    """32 MB in records of 1 MB."""
    records = [json.dumps("x" * (1 << 20))] * 32
    (tmp_path / "a.json").write_text("[" + ",".join(records) + "]" if form == "array" else "\n".join(records))
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_json_records(tmp_path / "a.json")) == 32
        assert tracemalloc.get_traced_memory()[1] < 12e6
    finally:
        tracemalloc.stop()
