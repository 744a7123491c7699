"""JSON records of a file, an array of them or one a line, plain or compressed (.gz, .xz, .zst).

Read as a stream: one record is in memory at a time, whatever the size of the file.
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
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from draftsmith.data.sources.conversation import InvalidConversation
from draftsmith.recipes.errors import UserError

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
CHUNK_BYTES = 1 << 20
BLANK = re.compile(r"[ \t\r\n]*")
CONVERT = "convert it to UTF-8, or give a .gz, .xz or .zst its suffix"


def read_json_records(file: Path) -> Iterator[tuple[str, Any]]:
    """Read a JSON array of records or JSON lines.

    Yields:
        (`file line 3`, record); a line that is not JSON, or not UTF-8, comes as an `InvalidConversation` in the
        record's place.

    Raises:
        UserError: The file is empty or cannot be decompressed, or an array is not UTF-8 or no JSON.
    """
    from zstandard import ZstdError

    try:
        with _open_bytes(file) as stream:
            blank_lines, first_line = _first_line(stream)
            if first_line.lstrip().startswith(b"["):
                yield from _array_records(file, _Window(file, stream, first_line, blank_lines + 1))
            else:
                whole = first_line if first_line.endswith(b"\n") else first_line + stream.readline()
                yield from _line_records(file, chain([whole], stream), blank_lines + 1)
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


def _first_line(stream: BinaryIO) -> tuple[int, bytes]:
    """The number of blank lines at the beginning, and the line after them or, of a long one, its beginning."""
    blank_lines = 0
    line = stream.readline(CHUNK_BYTES).removeprefix(codecs.BOM_UTF8)
    while line and not line.strip():
        blank_lines += line.endswith(b"\n")
        line = stream.readline(CHUNK_BYTES)
    return blank_lines, line


def _line_records(file: Path, lines: Iterator[bytes], first_number: int) -> Iterator[tuple[str, Any]]:
    empty = True
    for number, line in enumerate(lines, start=first_number):
        if not line.strip():
            continue
        empty = False
        where = f"{file} line {number}"
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            sentence = f"not UTF-8 text (byte 0x{line[error.start]:02x} at position {error.start + 1}): {CONVERT}"
            record = InvalidConversation(where, "not UTF-8", sentence)
        except json.JSONDecodeError as error:
            record = InvalidConversation(where, "not JSON", f"not JSON: {error.msg} (column {error.colno})")
        yield where, record
    if empty:
        raise UserError(f"{file} is empty: it must hold one JSON conversation a line, or a JSON array of them")


def _array_records(file: Path, window: "_Window") -> Iterator[tuple[str, Any]]:
    window.next_character()
    number, character = 0, window.next_character(peek=True)
    while character != "]":
        number += 1
        yield f"{file} conversation {number}", window.next_value()
        character = window.next_character()
        if character not in (",", "]"):
            window.fail("a comma or ] is missing")
    if number == 0:
        window.next_character()
    if window.next_character(peek=True):
        window.fail("there is text behind the array")


class _Window:
    """The stretch of the file's text that is in memory. `text[at:]` has not been read yet."""

    def __init__(self, file: Path, stream: BinaryIO, head: bytes, line: int) -> None:
        self._file, self._stream, self._line = file, stream, line
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._scan = json.JSONDecoder().raw_decode
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

    def next_value(self) -> Any:
        self.next_character(peek=True)
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._more():
                    continue
                self._at = error.pos
                self.fail(error.msg)
            # A number that ends where the window ends may go on.
            if end < len(self._text) or not self._more():
                self._at = end
                return value

    def fail(self, what: str) -> None:
        line = self._line + self._text.count("\n", 0, self._at)
        raise UserError(f"{self._file} line {line} is not JSON: {what}")

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
