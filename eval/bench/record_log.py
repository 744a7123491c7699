"""An append-only file of JSON lines that survives Ctrl-C, a killed process and a full disk."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from draftsmith.recipes.errors import UserError


class JsonlLog:
    """One record a line; a record is in the file whole or not at all once the file is opened again."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(file)

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records and wait until they are on disk."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        if not lines:
            return
        with self.file.open("ab") as stream:
            stream.write(lines.encode("utf-8"))
            stream.flush()
            os.fsync(stream.fileno())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.file.exists():
            return
        with self.file.open(encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    raise UserError(
                        f"{self.file} line {number} is not JSON, so the file was damaged: delete that line (it will be "
                        "generated again) or the whole folder"
                    ) from None


def _cut_torn_line(file: Path) -> None:
    """Remove what an interrupted append left behind the last newline."""
    if not file.exists():
        return
    with file.open("rb+") as stream:
        content_end = stream.seek(0, os.SEEK_END)
        position, tail = content_end, b""
        while position > 0 and b"\n" not in tail:
            position = max(0, position - (1 << 16))
            stream.seek(position)
            tail = stream.read(content_end - position)
        stream.truncate(position + tail.rfind(b"\n") + 1)
