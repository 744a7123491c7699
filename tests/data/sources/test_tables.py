"""Parquet and CSV are read as records; a damaged table is one sentence."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from draftsmith.data.sources.files import InvalidConversation, open_records, read_records
from draftsmith.data.sources.record_reader import parse_conversation
from draftsmith.errors import UserError
from draftsmith.recipes.schema import SourceRecipe

TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": 'a, "b"\nc'}]


def read_table(file: Path) -> list[tuple[str, Any]]:
    return list(open_records(SourceRecipe(source=str(file)), "all"))


@pytest.mark.parametrize("name", ["chats.parquet", "chats.jsonl", "chats"])
def test_parquet_is_read(tmp_path: Path, name: str) -> None:
    """It is recognized by its first bytes, not its name. A column that a row lacks is null."""
    file = tmp_path / name
    rows = [{"conversations": TURNS, "system": None}, {"conversations": TURNS[:1], "system": "s"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=1)
    found = read_table(file)
    assert [where for where, _ in found] == [f"{file} row 1", f"{file} row 2"]
    turns = [[(t.role, t.content) for t in parse_conversation(record, where).turns] for where, record in found]
    assert turns == [[("user", "q"), ("assistant", TURNS[1]["value"])], [("system", "s"), ("user", "q")]]


def test_null_keys_of_other_rows_are_left_out(tmp_path: Path) -> None:
    """A table's objects have the keys of all rows: null ones are neither parameters nor arguments of a tool."""
    file = tmp_path / "tools.parquet"
    asked = {"role": "user", "content": "q"}

    def row(name: str, argument: str) -> dict[str, Any]:
        function = {"name": name, "parameters": {"type": "object", "properties": {argument: {"type": "string"}}}}
        call = {"function": {"name": name, "arguments": {argument: "x"}}}
        turns = [asked, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"messages": turns, "tools": [{"type": "function", "function": function}]}

    rows = [row("sky", "city"), row("sum", "numbers")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert [parse_conversation(*pair[::-1]) for pair in read_table(file)] == [
        parse_conversation(each, "") for each in rows
    ]


def test_csv_is_read(tmp_path: Path) -> None:
    """With cells over several lines, quotation marks, BOM, CRLF and gzip; turns are JSON text, no value is null."""
    quoted = json.dumps(TURNS).replace('"', '""')
    text = f'\ufeffprompt,completion,conversations\r\n"a, b\nc",,\r\n,,"{quoted}"\r\n"x","y"\r\n'
    (tmp_path / "a.csv").write_bytes(text.encode())
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "a.tsv").write_text("prompt\tcompletion\nx\ty\n")
    for name in ("a.csv", "a.csv.gz"):
        found = read_table(tmp_path / name)
        assert found[0][1] == {"prompt": "a, b\nc", "completion": None, "conversations": None}
        assert [turn.content for turn in parse_conversation(found[1][1], "").turns] == ["q", TURNS[1]["value"]]
        assert found[2][1] == {"prompt": "x", "completion": "y", "conversations": None}
    assert [record for _, record in read_table(tmp_path / "a.tsv")] == [{"prompt": "x", "completion": "y"}]
    assert SourceRecipe(source="folder/a.csv.gz").label == SourceRecipe(source="a.parquet").label == "a"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.parquet", b"PAR1 and no more", "a.parquet cannot be read as Parquet"),
        ("a.parquet", b'{"messages": []}', "a.parquet cannot be read as Parquet"),
        ("a.csv", b"", "a.csv is empty: it must hold a header line"),
        ("a.csv", b"prompt,completion\n", "a.csv is empty: it must hold a header line"),
        ("a.csv", b"prompt\n\xe4\n", "a.csv is not UTF-8 text"),
        ("a.csv", b'prompt\n"x"y\n', "a.csv line 2 is no CSV"),
        ("a.csv.gz", b"prompt\nx\n", "a.csv.gz cannot be decompressed"),
    ],
)
def test_damaged_tables_are_reported(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        list(read_records(tmp_path / name))


def test_row_with_too_many_cells_is_one_invalid_record(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\na,b,c\nd,e\n")
    first, second = (record for _, record in read_table(tmp_path / "a.csv"))
    assert isinstance(first, InvalidConversation)
    assert "a.csv row 1: the row has more cells than the header's 2" in str(first)
    assert second == {"prompt": "d", "answer": "e"}
