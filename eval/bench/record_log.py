"""The append-only file of records: JSON lines that survive Ctrl-C, a killed process and a full disk."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic_core import from_json

from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.recipes.errors import UserError


class RecordLog:
    """A record is in the file whole, on a line of its own, or not at all once the file is opened again."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            with file.open("rb+") as stream:  # without what an interrupted append left behind the last newline
                stream.truncate(stream.read().rfind(b"\n") + 1)

    def append(self, record: QuestionRecord) -> None:
        """Wait until it is on disk."""
        with self.file.open("ab") as stream:
            stream.write((json.dumps(record.to_json(), ensure_ascii=False) + "\n").encode("utf-8"))
            stream.flush()
            os.fsync(stream.fileno())

    def __iter__(self) -> Iterator[QuestionRecord]:
        """
        Raises:
            UserError: A line is damaged, or was written by a version that measured less.
        """
        if not self.file.exists():
            return
        with self.file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    record = QuestionRecord.from_json(from_json(line, allow_inf_nan=False))
                except (ValueError, TypeError, KeyError, AttributeError):
                    raise UserError(
                        f"{self.file} line {number} is no record, so the file was damaged: delete that line (it will "
                        "be measured again) or the whole folder"
                    ) from None
                yield record
