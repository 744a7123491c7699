"""The raw records of one source: a local JSON file, a Hub dataset, or the conversations that ship with the package.

A file has one record a line, an array of them, or one after the other over several lines; plain or compressed (.gz,
.xz, .zst). `{"data": [...]}` is read as the array that it holds. Read as a stream: one record is in memory at a time,
whatever the size of the file, and no more than 16 MiB of it.
"""

import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, cast

from draftsmith.data.sources.conversation import InvalidConversation
from draftsmith.recipes.errors import UserError, did_you_mean
from draftsmith.recipes.schema import SourceRecipe

STDLIB = "stdlib"
STDLIB_FILE = Path(__file__).parents[1] / "embedded" / "conversations.jsonl.zst"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
CHUNK_BYTES = 1 << 20
MOST_RECORD_BYTES = 16 << 20  # a million tokens, each letter an escape
MOST_DIGITS = 400  # of an integer, which is a number of no use beyond that
BLANK = re.compile(r"[ \t\r\n]*")
CONTAINER = re.compile(r'\{\s*"data"\s*:\s*\[(?=\s*\{)')
LONGEST_CONTAINER_HEAD = 4096  # characters
TOO_DEEP, TOO_LARGE = "nested too deeply", "larger than 16 MiB"
DECODER = json.JSONDecoder(parse_int=lambda digits: (int if len(digits) < MOST_DIGITS else float)(digits))
CONVERT = "convert it to UTF-8, or give a .gz, .xz or .zst its suffix"

Split = Literal["train", "heldout", "all"]
Records = Iterator[tuple[str, Any]]


class UnusableJson(ValueError):
    """Text that gives no record: the sentence goes on after "is". `reason` is short and countable."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def open_records(recipe: SourceRecipe, split: Split) -> Records:
    """(where it was found, record) pairs; a line that is not JSON arrives as the error that it is.

    Args:
        recipe: Where to read.
        split: Used by `stdlib`, whose split is by module.

    Raises:
        UserError: There is no such file or dataset, or it cannot be read.
    """
    if recipe.source == STDLIB:
        records = (record for _, record in read_json_records(STDLIB_FILE))
        wanted = (record for record in records if split in ("all", record["split"]))
        return ((f"stdlib conversation {number}", record) for number, record in enumerate(wanted, start=1))
    file = Path(recipe.source).expanduser()
    if file.is_file():
        return read_json_records(file)
    if file.is_dir():
        raise UserError(f"data.conversations.source {file} is a folder: name one .json or .jsonl file in it")
    looks_like_a_file = recipe.source.startswith((".", "/", "~")) or _has_json_suffix(recipe.source)
    if looks_like_a_file or not HUB_ID.fullmatch(recipe.source):
        hint = f"its folder {file.parent} does not exist either"
        if file.parent.is_dir():
            names = [entry.name for entry in file.parent.iterdir() if entry.is_file()]
            hint = did_you_mean(file.name, names, "correct data.conversations.source")
        raise UserError(f"conversations file {file} does not exist: {hint}")
    return _hub_records(recipe)


def _has_json_suffix(name: str) -> bool:
    return Path(name).suffix in (*JSON_SUFFIXES, *COMPRESSED_SUFFIXES)


def _hub_records(recipe: SourceRecipe) -> Records:
    """A dataset of the Hugging Face Hub, or one JSON file of it.

    A JSON file is read by our own reader: `datasets` infers one schema for all rows, which mixed ShareGPT dumps break.
    """
    try:
        if recipe.file is not None and _has_json_suffix(recipe.file):
            import huggingface_hub

            downloaded = huggingface_hub.hf_hub_download(
                recipe.source, recipe.file, repo_type="dataset", revision=recipe.revision
            )
            return read_json_records(Path(downloaded))
        import datasets

        config = {} if recipe.hub_config is None else {"name": recipe.hub_config}
        rows = datasets.load_dataset(
            recipe.source, data_files=recipe.file, revision=recipe.revision, split=recipe.hub_split, **config
        )
    except Exception as error:  # the Hub's libraries raise dozens of unrelated classes (HTTP, offline, parsing, split)
        reason = " ".join(str(error).split()) or type(error).__name__
        part = f"split {recipe.hub_split}" + (f", file {recipe.file}" if recipe.file else "")
        raise UserError(
            f"Hub dataset {recipe.source} ({part}) cannot be loaded: {reason[:300]}; check the name and the network, "
            "or set data.conversations.source to a local file (of a mixture: the `source` of that entry)"
        ) from None
    return ((f"{recipe.source} row {number}", row) for number, row in enumerate(rows, start=1))


def json_of(line: bytes) -> Any:
    """The value of a line of JSON.

    Raises:
        UnusableJson: It is not UTF-8, no JSON, or more than any record is.
    """
    if len(line) > MOST_RECORD_BYTES:
        raise UnusableJson(TOO_LARGE, f"{TOO_LARGE}, which no conversation is")
    try:
        return DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte 0x{line[error.start]:02x} at position {error.start + 1}): {CONVERT}"
        raise UnusableJson("not UTF-8", what) from None
    except json.JSONDecodeError as error:
        raise UnusableJson("not JSON", f"not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise UnusableJson(TOO_DEEP, TOO_DEEP) from None


def read_json_records(file: Path) -> Records:
    """Read JSON lines, an array of records, or records one after the other, each over several lines.

    Yields:
        (`file line 3`, record); a line that is not JSON, or not UTF-8, comes as an `InvalidConversation` in the
        record's place.

    Raises:
        UserError: The file is empty or cannot be decompressed; or, unless its records are lines, a record is not UTF-8,
            no JSON, nested too deeply or too large.
    """
    from zstandard import ZstdError

    try:
        with _open_bytes(file) as stream:
            records = _records_over_lines(file, stream)
            if records is not None:
                yield from records
                return
        with _open_bytes(file) as stream:
            yield from _line_records(file, stream)
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, ZstdError, EOFError) as error:
        raise UserError(f"{file} cannot be decompressed ({error or 'it ends too early'}): fetch it again") from None


@contextmanager
def _open_bytes(file: Path) -> Iterator[BinaryIO]:
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
    number, empty = 0, True
    while line := stream.readline(MOST_RECORD_BYTES + 1):
        number += 1
        rest = line
        while len(line) > MOST_RECORD_BYTES and rest and not rest.endswith(b"\n"):
            rest = stream.readline(CHUNK_BYTES)
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        empty = False
        where = f"{file} line {number}"
        try:
            record = json_of(line)
        except UnusableJson as error:
            record = InvalidConversation(where, error.reason, str(error))
        yield where, record
    if empty:
        raise UserError(f"{file} is empty: it must hold one JSON conversation a line, or a JSON array of them")


def _records_over_lines(file: Path, stream: BinaryIO) -> Records | None:
    """The records of a file that has not one a line; None if it has, or may have."""
    number, line = 1, stream.readline(CHUNK_BYTES).removeprefix(codecs.BOM_UTF8)
    while line and not line.strip():
        number += line.endswith(b"\n")
        line = stream.readline(CHUNK_BYTES)
    if line.lstrip().startswith(b"["):
        window = _Window(file, stream, line, number)
        window.take()
        return _array_records(file, window)
    text = line.decode("utf-8", errors="replace").strip()
    if CONTAINER.match(text) or (text.startswith("{") and len(line) < CHUNK_BYTES and _is_a_beginning(text)):
        with suppress(UserError):  # what is wrong is told line by line
            window = _Window(file, stream, line, number)
            if window.enter_container():
                return _array_records(file, window, container=True)
            return _spread_records(file, window, window.next_value())
    return None


def _is_a_beginning(text: str) -> bool:
    """Whether it is JSON of which nothing but the rest is missing."""
    try:
        DECODER.decode(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)
    except RecursionError:
        return False
    return False


def _array_records(file: Path, window: "_Window", container: bool = False) -> Records:
    number = 0
    while number == 0 or window.take(",]", "a comma or ] is missing") == ",":
        if number == 0 and window.peek() == "]":
            window.take()
            break
        number += 1
        yield f"{file} conversation {number}", window.next_value()
    if container:  # with what else there may be about the data
        window.take("},", "a } is missing")
    elif window.peek():
        window.take("", "there is text after the array")


def _spread_records(file: Path, window: "_Window", first: Any) -> Records:
    yield f"{file} conversation 1", first
    number = 1
    while window.peek():
        number += 1
        yield f"{file} conversation {number}", window.next_value()


class _Window:
    """The stretch of the file's text that is in memory. `text[at:]` has not been read yet."""

    def __init__(self, file: Path, stream: BinaryIO, head: bytes, line: int) -> None:
        self._file, self._stream, self._line = file, stream, line
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at = self._decode(head), 0

    def peek(self) -> str:
        """Look at the next character that is not blank; empty at the end of the file."""
        while True:
            self._at = BLANK.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self, wanted: str | None = None, what: str = "") -> str:
        """Read the next character that is not blank; if it is none of those that are wanted, `what` is the error."""
        character = self.peek()
        self._at += len(character)
        if wanted is not None and (not character or character not in wanted):
            self._fail(f"is not JSON: {what}")
        return character

    def enter_container(self) -> bool:
        """Read the opening bracket of `{"data": [...]}`; False if that is not what begins here."""
        while len(self._text) - self._at < LONGEST_CONTAINER_HEAD and self._more():
            pass
        head = CONTAINER.match(self._text, BLANK.match(self._text, self._at).end())  # type: ignore[union-attr]
        self._at = head.end() if head else self._at
        return head is not None

    def next_value(self) -> Any:
        """Read a JSON value."""
        self.peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MOST_RECORD_BYTES:
                    self._fail(f"begins a record {TOO_LARGE}, which no conversation is, or is not JSON: {error.msg}")
                if self._more():
                    continue
                self._at = error.pos
                self._fail(f"is not JSON: {error.msg}")
            except RecursionError:
                self._fail(f"is {TOO_DEEP}")
            # A number that ends where the window ends may go on.
            if end < len(self._text) or not self._more():
                self._at = end
                return value

    def _fail(self, what: str) -> NoReturn:
        line = self._line + self._text.count("\n", 0, self._at)
        raise UserError(f"{self._file} line {line} {what}")

    def _more(self) -> bool:
        """Drop what was read and take in at least as much as is left, so that a long value is not scanned often."""
        rest = self._text[self._at :]
        chunk = self._stream.read(max(CHUNK_BYTES, len(rest)))
        if not chunk:
            self._decode(b"", final=True)
            return False
        self._line += self._text.count("\n", 0, self._at)
        self._text, self._at = rest + self._decode(chunk), 0
        return True

    def _decode(self, chunk: bytes, final: bool = False) -> str:
        try:
            return self._decoder.decode(chunk, final)
        except UnicodeDecodeError:
            raise UserError(f"{self._file} is not UTF-8 text: {CONVERT}") from None
