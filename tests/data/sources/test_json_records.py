"""Arrays, JSON lines, and records over several lines: their places, their errors, and bounded memory."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.sources.files import InvalidConversation, read_json_records
from draftsmith.errors import UserError

VALUES: list[Any] = [{"a": "ä" * 9, "b": [1, {}]}, 1234567, -1.5e3, "]", None, [[], '\\"'], {}, "€", 12]


@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_array_in_any_layout(tmp_path: Path, layout: dict[str, Any]) -> None:
    file = tmp_path / "a.json"
    file.write_text("\n \n" + json.dumps(VALUES, **layout) + " \n\n", encoding="utf-8")
    assert list(read_json_records(file)) == [(f"{file} record {n}", v) for n, v in enumerate(VALUES, start=1)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1,\n2\n3]", "line 3 is not JSON: Expecting ',' delimiter"),
        ("\n[1,\n{]", "line 3 is not JSON: Expecting property name"),
        ("[1,\n2]\nx", "line 3 is not JSON: Expecting value"),
        ("[1,\n2", "line 2 is not JSON: Expecting ',' delimiter"),
        ("[1,]", "line 1 is not JSON: Expecting value"),
        ('{"data": [{}, {}]', "line 1 is not JSON: Expecting ',' delimiter"),
        ('{\n"a": 1\n}\n{', "line 4 is not JSON: Expecting property name"),
        ("[" * 100_000, "line 1 is nested too deeply"),
        ("[\udcff]", "is not UTF-8 text: convert it"),
    ],
)
def test_broken_records_over_several_lines(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        list(read_json_records(tmp_path / "a.json"))
    assert f"a.json {sentence}" in str(caught.value)


def test_invalid_lines_are_reported_in_their_place(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\n{"a": 1}\r\n\xff\n{\n"\xe2\x80\xa8"')  # U+2028 does not end a line of JSON lines
    found = list(read_json_records(file))
    assert [where for where, _ in found] == [f"{file} line {n}" for n in (2, 3, 4, 5)]
    assert found[0][1] == {"a": 1}
    assert [error.reason for _, error in found[1:3] if isinstance(error, InvalidConversation)] == [
        "not UTF-8",
        "not JSON",
    ]
    assert found[3][1] == "\u2028"


ONE = {"messages": [{"role": "user", "content": "a"}]}
TWO = {"messages": [{"role": "user", "content": "b"}], "n": 3}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ONE, indent=2) + "\n" + json.dumps(TWO, indent=4),
        json.dumps({"data": [ONE, TWO]}),
        json.dumps({"data": [ONE, TWO], "version": 1}, indent=2),
        json.dumps([ONE, TWO], indent=2),
    ],
)
def test_records_over_several_lines(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    for before in ("", "\n\n", "\ufeff"):
        file.write_text(before + text, encoding="utf-8")
        assert list(read_json_records(file)) == [(f"{file} record 1", ONE), (f"{file} record 2", TWO)]


@pytest.mark.parametrize("first", ['{"a": 1}x', '{"a": [1,', '{"a": ', "{", '{"a": "b', "{]", '{"a": \udcff}'])
def test_broken_first_line_loses_only_that_line(tmp_path: Path, first: str) -> None:
    file = tmp_path / "a.jsonl"
    lines = "\n".join([first, json.dumps(ONE), json.dumps(TWO)])
    file.write_bytes(lines.encode("utf-8", errors="surrogateescape"))
    (_, broken), *others = read_json_records(file)
    assert isinstance(broken, InvalidConversation)
    assert others == [(f"{file} line 2", ONE), (f"{file} line 3", TWO)]


def test_lines_that_cannot_be_conversations(tmp_path: Path) -> None:
    """Too deep or too large ones are counted, and later lines are read. A number of 5,000 digits is accepted."""
    file = tmp_path / "a.jsonl"
    deep = '{"a": ' + "[" * 100_000
    digits = '{"n": %s, "prompt": "a"}' % ("9" * 5000)
    large = json.dumps({"prompt": "x" * (50 << 20)})
    file.write_text("\n".join([deep, digits, large, json.dumps(ONE), large]))
    tracemalloc.start()
    try:
        found = [record for _, record in read_json_records(file)]
        assert tracemalloc.get_traced_memory()[1] < 60e6
    finally:
        tracemalloc.stop()
    assert [getattr(record, "reason", None) for record in found] == [
        "nested too deeply", None, "larger than 16 MiB", None, "larger than 16 MiB",
    ]  # fmt: skip
    assert found[1]["prompt"] == "a"
    assert found[3] == ONE
