"""Files in every format: their records with their places, one sentence for each damage, and bounded memory."""

import gzip
import json
import lzma
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from draftsmith.data.sources import files
from draftsmith.data.sources.files import read_records
from draftsmith.data.sources.record_reader import parse_conversation
from draftsmith.errors import UserError
from draftsmith.recipes.conversations import SourceRecipe

VALUES: list[Any] = [{"a": "ä" * 9, "b": [1, {}]}, 1234567, -1.5e3, "]", None, [[], '\\"'], {}, "€", 12]
ONE = {"messages": [{"role": "user", "content": "a"}]}
TWO = {"messages": [{"role": "user", "content": "b"}], "n": 3}
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": 'a, "b"\nc'}]


@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_array_in_any_layout(tmp_path: Path, layout: dict[str, Any]) -> None:
    file = tmp_path / "a.json"
    for before in ("", "\n \n", "\ufeff"):
        file.write_text(before + json.dumps(VALUES, **layout) + " \n\n", encoding="utf-8")
        assert list(read_records(file)) == [(f"{file} record {n}", v) for n, v in enumerate(VALUES, start=1)]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_compressed_files(tmp_path: Path, suffix: str) -> None:
    compress = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    file = tmp_path / f"a.json{suffix}"
    for text, unit in ((f"\n{json.dumps(ONE)}\n\n{json.dumps(TWO)}\n", "line"), (json.dumps([ONE, TWO]), "record")):
        file.write_bytes(compress(text.encode()))
        assert [record for _, record in read_records(file)] == [ONE, TWO]
        assert next(read_records(file))[0].startswith(f"{file} {unit} ")


@pytest.mark.parametrize("name", ["chats.parquet", "chats.jsonl", "chats"])
def test_parquet_is_read(tmp_path: Path, name: str) -> None:
    """It is recognized by its first bytes, not its name. A column that a row lacks is null."""
    file = tmp_path / name
    rows = [{"conversations": TURNS, "system": None}, {"conversations": TURNS[:1], "system": "s"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=1)
    found = list(read_records(file))
    assert [where for where, _ in found] == [f"{file} row 1", f"{file} row 2"]
    turns = [[(t.role, t.content) for t in parse_conversation(record, where).turns] for where, record in found]
    assert turns == [[("user", "q"), ("assistant", TURNS[1]["value"])], [("system", "s"), ("user", "q")]]


def test_parquet_cells_that_cannot_be_conversations(tmp_path: Path) -> None:
    not_utf8 = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, *map(pyarrow.py_buffer, (b"\0\0\0\0\2\0\0\0", b"\xff\xfe"))]
    )
    columns = {"large": pyarrow.array(["x" * (17 << 20)]), "utf-8": not_utf8}
    columns["date"] = pyarrow.array([2**62], pyarrow.timestamp("ms"))
    reasons = []
    for name, column in columns.items():
        parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / name)
        ((_, found),) = read_records(tmp_path / name)
        assert str(found).startswith(f"{tmp_path / name} row 1: ")
        reasons.append(found.reason)
    assert reasons == ["larger than 16 MiB", "unreadable cell", "unreadable cell"]


def test_csv_is_read(tmp_path: Path) -> None:
    """With cells over several lines, quotation marks, BOM, CRLF and gzip; turns are JSON text, no value is null."""
    quoted = json.dumps(TURNS).replace('"', '""')
    text = f'\ufeffprompt,completion,conversations\r\n"a, b\nc",,\r\n,,"{quoted}"\r\n"007","NA",\r\n'
    (tmp_path / "a.csv").write_bytes(text.encode())
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "a.tsv").write_text("prompt\tcompletion\nx\ty\n")
    for name in ("a.csv", "a.csv.gz"):
        first, second, third = (record for _, record in read_records(tmp_path / name))
        assert first == {"prompt": "a, b\nc", "completion": None, "conversations": None}
        assert [turn.content for turn in parse_conversation(second, "").turns] == ["q", TURNS[1]["value"]]
        assert third == {"prompt": "007", "completion": "NA", "conversations": None}
    assert [record for _, record in read_records(tmp_path / "a.tsv")] == [{"prompt": "x", "completion": "y"}]
    assert SourceRecipe(source="folder/a.csv.gz").label == SourceRecipe(source="a.parquet").label == "a"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", "\n[1,\n{]", "line 3 (record 2) is not JSON: Expecting property name"),
        ("a.json", "[" * 100_000, "record 1 is nested too deeply"),
        ("a.json", json.dumps([ONE, TWO])[:-1], "ends inside its array, after record 2: download it again"),
        ("a.json", json.dumps([ONE, TWO])[:-9], "line 1 (record 2) is not JSON: Expecting property name"),
        ("a.json", b"[\xff]", "is not UTF-8 text: convert it"),
        ("a.jsonl", "", "is empty: it must hold one JSON conversation per line"),
        ("a.jsonl.gz", "not gzip", "cannot be decompressed"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}', mtime=0)[:-12], "cannot be decompressed"),
        ("a.jsonl.xz", "not xz", "cannot be decompressed"),
        ("a.jsonl.zst", "not zstd", "cannot be decompressed"),
        ("a.parquet", "PAR1 and no more", "cannot be read as Parquet"),
        ("a.parquet", '{"messages": []}', "cannot be read as Parquet"),
        ("a.csv", "", "cannot be read as CSV (Empty CSV file)"),
        ("a.csv", "prompt,completion\n", "is empty: it must hold one conversation per row"),
        ("a.csv", b"prompt\n\xe4\n", "cannot be read as CSV (In CSV column #0: "),
        ("a.csv", "prompt,answer\na,b,c\n", "cannot be read as CSV (CSV parse error: Row #2: Expected 2 columns"),
        ("a.csv.gz", "prompt\nx\n", "cannot be read as CSV"),
    ],
)
def test_damaged_files_are_reported(tmp_path: Path, name: str, content: str | bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        list(read_records(tmp_path / name))
    assert f"{name} {sentence}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_lines_are_reported_in_their_place(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\n{"a": 1}\r\n\xff\n{\n"\xe2\x80\xa8"')  # U+2028 does not end a line of JSON lines
    found = list(read_records(file))
    assert [where for where, _ in found] == [f"{file} line {n}" for n in (2, 3, 4, 5)]
    first, second, third, last = (record for _, record in found)
    assert (first, last) == ({"a": 1}, "\u2028")
    assert (second.reason, third.reason) == ("not UTF-8", "not JSON")
    assert str(second).startswith(f"{file} line 3: not UTF-8 text (byte 0xff at position 1)")


def test_lines_that_cannot_be_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too deep or too large ones are counted, and later lines are read. A number of 5,000 digits is accepted."""
    monkeypatch.setattr(files, "MOST_RECORD_BYTES", 1 << 20)
    file = tmp_path / "a.jsonl"
    deep = '{"a": ' + "[" * 100_000
    digits = '{"n": %s, "prompt": "a"}' % ("9" * 5000)
    large = json.dumps({"prompt": "x" * (16 << 20)})
    file.write_text("\n".join([deep, digits, large, json.dumps(ONE), large]))
    tracemalloc.start()
    try:
        found = [record for _, record in read_records(file)]
        assert tracemalloc.get_traced_memory()[1] < 6e6
    finally:
        tracemalloc.stop()
    assert [getattr(record, "reason", None) for record in found] == [
        "nested too deeply", None, "larger than 16 MiB", None, "larger than 16 MiB",
    ]  # fmt: skip
    assert found[1]["prompt"] == "a"
    assert found[3] == ONE
