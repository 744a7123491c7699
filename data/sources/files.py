"""Records of a local file (JSON, Parquet or CSV), a Hub dataset, or the conversations that ship with the package.

Tables are read by Arrow, Hub datasets by `datasets`, JSON by this module.

A JSON file has one record a line, or is an array of records; plain or compressed (.gz, .xz, .zst). Lines are read as a
stream, one record at a time; the text of an array is in memory as a whole.

A row of a table is a record of its columns. Cells without a value are null; turns in a CSV cell are JSON text.
"""

import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from draftsmith.errors import UserError, did_you_mean, reason
from draftsmith.recipes.conversations import SourceRecipe

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", ".csv", ".tsv")
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
FILE_SUFFIXES = (*JSON_SUFFIXES, *TABLE_SUFFIXES, *COMPRESSED_SUFFIXES)
PARQUET_MAGIC = b"PAR1"
TABLE_ROWS = 64  # of a Parquet file, in memory at a time
DELIMITERS = {".csv": ",", ".tsv": "\t"}
HEAD_BYTES = 1 << 20
MOST_RECORD_BYTES = 16 << 20  # a million tokens, each letter an escape
MOST_DIGITS = 400  # of an integer, which is a number of no use beyond that
NOT_BLANK_OR_COMMA = re.compile(r"[^ \t\r\n,]")
TOO_DEEP, TOO_LARGE = "nested too deeply", "larger than 16 MiB"
DECODER = json.JSONDecoder(parse_int=lambda digits: (int if len(digits) < MOST_DIGITS else float)(digits))
CONVERT = "convert it to UTF-8; a compressed file needs the suffix .gz, .xz or .zst"

Records = Iterator[tuple[str, Any]]
STDLIB = "stdlib"
STDLIB_FILE = Path(__file__).parents[1] / "embedded" / "conversations.jsonl.zst"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
Split = Literal["train", "heldout", "all"]


class InvalidConversation(UserError):
    """Error for a record that cannot be used. reason: short name under which `skip_invalid` counts the record."""

    def __init__(self, where: str, reason: str, sentence: str) -> None:
        super().__init__(
            f"{where}: {sentence}; fix it, or set data.conversations.skip_invalid=true to skip and count such cases"
        )
        self.where, self.reason, self.sentence = where, reason, sentence


def parse_json_line(line: bytes, where: str) -> Any:
    """Parse a line of JSON; `where` is its place, for the error message.

    Raises:
        InvalidConversation: The line is not UTF-8, not JSON, or too large for a record.
    """
    try:
        if len(line) > MOST_RECORD_BYTES:
            raise InvalidConversation(where, TOO_LARGE, f"the record is {TOO_LARGE}, too large for a conversation")
        return DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte 0x{line[error.start]:02x} at position {error.start + 1}): {CONVERT}"
        raise InvalidConversation(where, "not UTF-8", what) from None
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} (column {error.colno}; a file has one record a line, or is an array of records)"
        raise InvalidConversation(where, "not JSON", what) from None
    except RecursionError:
        raise InvalidConversation(where, TOO_DEEP, TOO_DEEP) from None


def read_records(file: Path) -> Records:
    """Read the records of a JSON, Parquet or CSV file, plain or compressed.

    Yields:
        (place, as `FILE line 3`; record). For a line that cannot be read, the record is an `InvalidConversation`.

    Raises:
        UserError: The file is empty, damaged, or in none of the formats.
    """
    with file.open("rb") as stream:
        is_parquet = stream.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    name = file.with_suffix("") if file.suffix in COMPRESSED_SUFFIXES else file
    if is_parquet or file.suffix == ".parquet" or name.suffix in DELIMITERS:
        return _table_records(file, DELIMITERS.get(name.suffix))
    return read_json_records(file)


def _table_records(file: Path, delimiter: str | None) -> Records:
    """Read the rows of a Parquet file, or with a delimiter of a CSV file, by Arrow.

    `datasets` reads CSV by pandas, which moves the cells of a row that has too many of them to other columns.
    """
    import pyarrow
    from pyarrow import csv, parquet

    number = 0
    try:
        if delimiter is None:
            batches = parquet.ParquetFile(file).iter_batches(TABLE_ROWS)
        else:
            # With threads, the number of cores would decide whether an error names its row.
            read = csv.ReadOptions(block_size=MOST_RECORD_BYTES, use_threads=False)
            form = read, csv.ParseOptions(delimiter=delimiter)
            form[1].newlines_in_values = True
            with pyarrow.input_stream(str(file), compression="detect") as stream:
                text = dict.fromkeys(csv.open_csv(stream, *form).schema.names, pyarrow.string())
            as_text = csv.ConvertOptions(column_types=text, strings_can_be_null=True, null_values=[""])
            batches = csv.open_csv(pyarrow.input_stream(str(file), compression="detect"), *form, as_text)
        rows = (batch.slice(row, 1) for batch in batches for row in range(len(batch)))
        for number, row in enumerate(rows, start=1):
            yield f"{file} row {number}", _table_row(row, f"{file} row {number}")
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        kind = "CSV" if delimiter else "Parquet"
        raise UserError(f"{file} cannot be read as {kind} ({reason(error)}): fetch or write it again") from None
    if number == 0:
        raise UserError(f"{file} is empty: it must hold one conversation per row")


def _table_row(row: Any, where: str) -> Any:
    """Return an Arrow table of one row as a record, or as what is wrong with it."""
    try:
        if row.nbytes > MOST_RECORD_BYTES:
            return InvalidConversation(where, TOO_LARGE, f"the record is {TOO_LARGE}, too large for a conversation")
        return table_record(row.to_pylist()[0])
    except (ValueError, OverflowError) as error:  # text that is no UTF-8, a date beyond Python's
        return InvalidConversation(where, "unreadable cell", f"a cell cannot be read ({error})")


def table_record(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a typed table as a record, without the nulls inside its objects.

    Such a table gives all objects of a column the same keys, with null where a row has no such key. If these nulls
    stayed, every tool would have the parameters of all tools.
    """
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Remove keys with the value null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


@contextmanager
def _decoding_errors(file: Path) -> Iterator[None]:
    """Raise a UserError in place of what decoding and decompressing raise."""
    from zstandard import ZstdError

    try:
        yield
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text: {CONVERT}") from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, ZstdError, EOFError) as error:
        raise UserError(f"{file} cannot be decompressed ({error or 'it ends too early'}): fetch it again") from None


def read_json_records(file: Path) -> Records:
    """Read a JSON file: records one per line, or in an array.

    Yields:
        (place, as `FILE line 3`; record). For a line that is not JSON, or not UTF-8, the record is an
        `InvalidConversation`.

    Raises:
        UserError: The file is empty or cannot be decompressed; or it is an array, and not UTF-8 or not JSON.
    """
    with _decoding_errors(file):
        with _open_bytes(file) as stream:
            is_array = stream.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        with _open_bytes(file) as stream:
            if is_array:
                yield from _array_records(file, stream.read().decode("utf-8-sig"))
            else:
                yield from _line_records(file, stream)


@contextmanager
def _open_bytes(file: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed."""
    with file.open("rb") as raw:
        if file.suffix == ".zst":
            import zstandard

            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
                yield cast(BinaryIO, io.BufferedReader(cast(Any, stream)))
        elif file.suffix in (".gz", ".xz"):
            with (gzip if file.suffix == ".gz" else lzma).open(raw) as stream:
                yield cast(BinaryIO, stream)
        else:
            yield raw


def _line_records(file: Path, stream: BinaryIO) -> Records:
    """Read one JSON value per line."""
    number, empty = 0, True
    while line := stream.readline(MOST_RECORD_BYTES + 1):
        number += 1
        rest = line
        while len(line) > MOST_RECORD_BYTES and rest and not rest.endswith(b"\n"):
            rest = stream.readline(HEAD_BYTES)
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        empty, where = False, f"{file} line {number}"
        try:
            yield where, parse_json_line(line, where)
        except InvalidConversation as error:
            yield where, error
    if empty:
        raise UserError(
            f"{file} is empty: it must hold one JSON conversation per line, or a JSON array of conversations"
        )


def _array_records(file: Path, text: str) -> Records:
    """Read the items of an array.

    Raises:
        UserError: An item is no JSON, or the text ends inside the array.
    """
    number, end = 0, text.index("[") + 1
    while (start := NOT_BLANK_OR_COMMA.search(text, end)) is not None and start[0] != "]":
        try:
            value, end = DECODER.raw_decode(text, start.start())
        except RecursionError:
            raise UserError(f"{file} record {number + 1} is {TOO_DEEP}") from None
        except json.JSONDecodeError as error:
            raise UserError(
                f"{file} line {error.lineno} (record {number + 1:,}) is not JSON: {error.msg}: correct it, or download "
                "the file again"
            ) from None
        number += 1
        yield f"{file} record {number}", value
    if start is None:
        raise UserError(f"{file} ends inside its array, after record {number:,}: download it again")


def is_hub_name(source: str) -> bool:
    """Return whether a source that is no local file has the form of a Hub dataset's id."""
    looks_like_a_file = source.startswith((".", "/", "~")) or source.endswith(FILE_SUFFIXES)
    return not looks_like_a_file and HUB_ID.fullmatch(source) is not None


def open_records(recipe: SourceRecipe, split: Split) -> Records:
    """Read the (place, record) pairs of a source; for a line that is not JSON, the record is an `InvalidConversation`.

    Args:
        recipe: The source.
        split: Part of `stdlib` to read, which is split by Python module; other sources ignore it.

    Raises:
        UserError: The file or dataset does not exist, or cannot be read.
    """
    if recipe.source == STDLIB:
        records = (record for _, record in read_json_records(STDLIB_FILE))
        of_split = (record for record in records if split in ("all", record["split"]))
        return ((f"stdlib conversation {number}", record) for number, record in enumerate(of_split, start=1))
    file = Path(recipe.source)
    if file.is_file():
        return read_records(file)
    if file.is_dir():
        raise UserError(
            f"data.conversations.source {file} is a folder and no distilled set (there is no card.json): name one "
            ".json, .jsonl, .parquet or .csv file in it"
        )
    if not is_hub_name(recipe.source):
        hint = f"its folder {file.parent} does not exist either"
        if file.parent.is_dir():
            names = [entry.name for entry in file.parent.iterdir() if entry.is_file()]
            hint = did_you_mean(file.name, names, "correct data.conversations.source")
        raise UserError(f"conversations file {file} does not exist: {hint}")
    return _hub_records(recipe)


def _hub_records(recipe: SourceRecipe) -> Records:
    """Read a dataset of the Hugging Face Hub, or one JSON file of it.

    A JSON file is read by our own reader: `datasets` infers one schema for all rows, which mixed ShareGPT dumps break.
    """
    try:
        if recipe.file is not None and recipe.file.endswith(FILE_SUFFIXES):
            import huggingface_hub

            downloaded = huggingface_hub.hf_hub_download(
                recipe.source, recipe.file, repo_type="dataset", revision=recipe.revision
            )
            return read_records(Path(downloaded))
        import datasets

        config = {} if recipe.hub_config is None else {"name": recipe.hub_config}
        rows = datasets.load_dataset(
            recipe.source, data_files=recipe.file, revision=recipe.revision, split=recipe.hub_split, **config
        )
    except Exception as error:  # the Hub's libraries raise dozens of unrelated classes (HTTP, offline, parsing, split)
        part = f"split {recipe.hub_split}" + (f", file {recipe.file}" if recipe.file else "")
        raise UserError(
            f"Hub dataset {recipe.source} ({part}) cannot be loaded: {reason(error)}; check the name and the network, "
            "or set data.conversations.source to a local file (of a mixture: the `source` of that entry)"
        ) from None
    return ((f"{recipe.source} row {number}", table_record(row)) for number, row in enumerate(rows, start=1))
