"""Append-only files of JSON lines, one writer each: where a run's conversations lie. The ledger says which lines count.

A line is in the file whole or, behind what the ledger knows, not at all: what a killed writer left without a newline is
ignored, and what a full disk cut is taken back.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.recipes.errors import UserError

FULL_SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class Place:
    """Where a line lies; `length_bytes` without its newline."""

    shard: str
    offset_bytes: int
    length_bytes: int


class ShardWriter:
    """The files of one writer: `<name>-000.jsonl`, `<name>-001.jsonl`, ..."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self._part = folder, name, 0

    def append(self, records: list[dict[str, Any]]) -> list[Place]:
        """Add records and wait until they are on disk.

        Raises:
            OSError: The disk is full; the file is as it was.
        """
        if not records:
            return []
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{self._name}-{self._part:03d}.jsonl"
        if file.exists() and file.stat().st_size >= FULL_SHARD_BYTES:
            self._part += 1
            return self.append(records)
        lines = [json.dumps(record, ensure_ascii=False).encode("utf-8") for record in records]
        with file.open("ab") as stream:
            begin = stream.tell()
            try:
                stream.write(b"".join(line + b"\n" for line in lines))
                stream.flush()
                os.fsync(stream.fileno())
            except BaseException:
                os.ftruncate(stream.fileno(), begin)
                raise
        places = []
        for line in lines:
            places.append(Place(file.name, begin, len(line)))
            begin += len(line) + 1
        return places


class ShardReader:
    """Reads lines anywhere in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, places: Iterator[Place]) -> Iterator[dict[str, Any]]:
        """The records at these places, in their order.

        Raises:
            UserError: There is no such line.
        """
        streams: dict[str, Any] = {}
        try:
            for place in places:
                file = self._folder / place.shard
                try:
                    if place.shard not in streams:
                        streams[place.shard] = file.open("rb")
                    stream = streams[place.shard]
                    stream.seek(place.offset_bytes)
                    yield json.loads(stream.read(place.length_bytes))
                except (FileNotFoundError, ValueError):
                    raise UserError(
                        f"{file} was changed or damaged at byte {place.offset_bytes}: restore it, or delete "
                        f"{self._folder.parent} to distil again"
                    ) from None
        finally:
            for stream in streams.values():
                stream.close()

    def names(self) -> list[str]:
        """The files that are there."""
        return sorted(file.name for file in self._folder.glob("*.jsonl"))

    def lines_after(self, shard: str, offset_bytes: int) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Whole lines from a place on; one that is torn or damaged ends it."""
        with (self._folder / shard).open("rb") as stream:
            stream.seek(offset_bytes)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                try:
                    record = json.loads(line)
                except ValueError:
                    return
                yield Place(shard, offset_bytes, len(line) - 1), record
                offset_bytes += len(line)
