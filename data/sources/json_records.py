"""JSON records of a file, one a line, an array of them or one after the other, plain or compressed (.gz, .xz, .zst).

Read as a stream: one record is in memory at a time, whatever the size of the file, and no more than 16 MiB of it.
`{"data": [...]}` is read as the array that it holds.
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
from typing import Any, BinaryIO, NoReturn, cast

from draftsmith.data.sources.conversation import InvalidConversation
from draftsmith.recipes.errors import UserError

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
CHUNK_BYTES = 1 << 20
MOST_RECORD_BYTES = 16 << 20  # a million tokens, each letter an escape
MOST_DIGITS = 400  # of an integer, which is a number of no use beyond that
BLANK = re.compile(r"[ \t\r\n]*")
CONTAINER = re.compile(r'\{\s*"data"\s*:\s*\[(?=\s*\{)')
LONGEST_CONTAINER_HEAD = 4096  # characters
TOO_DEEP, TOO_LARGE = "nested too deeply", "larger than 16 MiB"
DECODER = json.JSONDecoder(parse_int=lambda digits: (int if len(digits) < MOST_DIGITS else float)(digits))
CONVERT = "convert it to UTF-8, or give a .gz, .xz or .zst its suffix"


class UnusableJson(ValueError):
    """Text that gives no record: the sentence goes on behind "is". `reason` is short and countable."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


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
        byte, position = line[error.start], error.start + 1
        raise UnusableJson(
            "not UTF-8", f"not UTF-8 text (byte 0x{byte:02x} at position {position}): {CONVERT}"
        ) from None
    except json.JSONDecodeError as error:
        raise UnusableJson("not JSON", f"not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise UnusableJson(TOO_DEEP, TOO_DEEP) from None


def read_json_records(file: Path) -> Iterator[tuple[str, Any]]:
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
        if file.suffix == ".gz":
            with gzip.open(raw) as stream:
                yield cast(BinaryIO, stream)
        elif file.suffix == ".xz":
            with lzma.open(raw) as stream:
                yield cast(BinaryIO, stream)
        elif file.suffix == ".zst":
            import zstandard

            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
                yield cast(BinaryIO, io.BufferedReader(cast(Any, stream)))
        else:
            yield raw


def _records_over_lines(file: Path, stream: BinaryIO) -> Iterator[tuple[str, Any]] | None:
    """The records of a file that has not one a line; None if it has, or may have."""
    blank_lines, line = _first_line(stream)
    if line.lstrip().startswith(b"["):
        window = _Window(file, stream, line, blank_lines + 1)
        window.next_character()
        return _array_records(file, window)
    text = line.decode("utf-8", errors="replace").strip()
    if CONTAINER.match(text) or (text.startswith("{") and len(line) < CHUNK_BYTES and _goes_on(text)):
        with suppress(UserError):  # what is wrong is told line by line
            window = _Window(file, stream, line, blank_lines + 1)
            if window.enter_container():
                return _array_records(file, window, container=True)
            return _spread_records(file, window, window.next_value())
    return None


def _goes_on(text: str) -> bool:
    """Whether it is the beginning of JSON, and nothing but the rest is missing."""
    try:
        DECODER.decode(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)
    except RecursionError:
        return False
    return False


def _first_line(stream: BinaryIO) -> tuple[int, bytes]:
    """The number of blank lines at the beginning, and the line after them or, of a long one, its beginning."""
    blank_lines = 0
    line = stream.readline(CHUNK_BYTES).removeprefix(codecs.BOM_UTF8)
    while line and not line.strip():
        blank_lines += line.endswith(b"\n")
        line = stream.readline(CHUNK_BYTES)
    return blank_lines, line


def _line_records(file: Path, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
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


def _array_records(file: Path, window: "_Window", container: bool = False) -> Iterator[tuple[str, Any]]:
    number, character = 0, window.next_character(peek=True)
    while character != "]":
        number += 1
        yield f"{file} conversation {number}", window.next_value()
        character = window.next_character()
        if character not in (",", "]"):
            window.fail("is not JSON: a comma or ] is missing")
    if number == 0:
        window.next_character()
    character = window.next_character(peek=True)
    if container and character not in ("}", ","):  # with what else there may be about the data
        window.fail("is not JSON: a } is missing")
    if character and not container:
        window.fail("is not JSON: there is text behind the array")


def _spread_records(file: Path, window: "_Window", first: Any) -> Iterator[tuple[str, Any]]:
    number, record = 1, first
    yield f"{file} conversation {number}", record
    while window.next_character(peek=True):
        number += 1
        yield f"{file} conversation {number}", window.next_value()


class _Window:
    """The stretch of the file's text that is in memory. `text[at:]` has not been read yet."""

    def __init__(self, file: Path, stream: BinaryIO, head: bytes, line: int) -> None:
        self._file, self._stream, self._line = file, stream, line
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._scan = DECODER.raw_decode
        self._text, self._at = self._decode(head), 0

    def next_character(self, peek: bool = False) -> str:
        """The next character that is not blank; empty at the end of the file."""
        while True:
            self._at = BLANK.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self._at < len(self._text) or not self._more():
                break
        character = self._text[self._at : self._at + 1]
        self._at += 0 if peek else len(character)
        return character

    def enter_container(self) -> bool:
        """Go behind the opening bracket of `{"data": [...]}`; False if that is not what begins here."""
        while len(self._text) - self._at < LONGEST_CONTAINER_HEAD and self._more():
            pass
        head = CONTAINER.match(self._text, BLANK.match(self._text, self._at).end())  # type: ignore[union-attr]
        self._at = head.end() if head else self._at
        return head is not None

    def next_value(self) -> Any:
        self.next_character(peek=True)
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MOST_RECORD_BYTES:
                    self.fail(f"begins a record {TOO_LARGE}, which no conversation is, or is not JSON: {error.msg}")
                if self._more():
                    continue
                self._at = error.pos
                self.fail(f"is not JSON: {error.msg}")
            except RecursionError:
                self.fail(f"is {TOO_DEEP}")
            # A number that ends where the window ends may go on.
            if end < len(self._text) or not self._more():
                self._at = end
                return value

    def fail(self, what: str) -> NoReturn:
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
