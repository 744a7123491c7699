"""The ledger: the state of each conversation of a run folder, in append-only files of JSON lines, each with one writer.

    shards/<n>.jsonl        finished conversations with their answers, from which the token dataset is built
    unfinished/<n>.jsonl    answers of unfinished conversations, and failures

A line counts only if it ends with a newline; if `shards/` has several lines of a conversation, the first one counts. So
a process that is killed at any moment, SIGKILL included, loses at most the answers that it had not committed.

Several processes may write to one folder, also on several hosts: each to separate files, about conversations that no
other one answers (`distill`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.sources.distilled import SHARDS, DistilledLine, kept_conversation, kept_record
from draftsmith.errors import UserError
from draftsmith.files import append_whole

UNFINISHED = "unfinished"


class _StoredAnswer(TypedDict):
    text: str
    token_ids: list[int] | None
    prompt_ids: NotRequired[list[int] | None]  # of records of the release before: unknown


class _AnswerLine(TypedDict):
    """A line of `unfinished/`, of one answer."""

    id: str
    turn: int
    answer: _StoredAnswer


class _FailedLine(TypedDict):
    """A line of `unfinished/`, of a conversation that failed."""

    id: str
    failed: str


_LINES: dict[str, TypeAdapter[Any]] = {
    SHARDS: TypeAdapter(DistilledLine),
    UNFINISHED: TypeAdapter(_AnswerLine | _FailedLine),
}


class _Line(NamedTuple):
    """Place of a kept conversation's line, and why later answers are missing."""

    file: Path
    offset_bytes: int
    reason: str | None


class LedgerView:
    """Read-only view of a run's ledger: the stored state and answers of each conversation.

    Args:
        folder: `runs/<name>/data`.
        ids: Ids of the conversations to read; `num_others` counts the other kept ones. None: read all.

    Raises:
        UserError: Nothing was distilled yet, or a file is damaged.
    """

    def __init__(self, folder: Path, ids: Collection[str] | None = None) -> None:
        if not (folder / SHARDS).exists() and not (folder / UNFINISHED).exists():
            raise UserError(f"{folder / SHARDS} does not exist: run `draftsmith distill` with the same recipe first")
        self._folder, self._ids = folder, ids
        self._others: set[str] = set()
        self._kept: dict[str, _Line] = {}
        self._failed: dict[str, str] = {}
        self._answers: dict[str, dict[int, dict[str, Any]]] = {}
        for file in [*self.files(), *sorted((folder / UNFINISHED).glob("*.jsonl"))]:
            self._read(file)

    def __len__(self) -> int:
        """Return the number of kept conversations, which are finished and have answers."""
        return len(self._kept)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the stored records of the kept conversations, sorted by id; the order is the same after interruptions.

        Raises:
            UserError: A file was changed since it was read first.
        """
        with ExitStack() as stack:
            streams: dict[Path, Any] = {}
            for key in sorted(self._kept):
                line = self._kept[key]
                if line.file not in streams:
                    streams[line.file] = stack.enter_context(line.file.open("rb"))
                streams[line.file].seek(line.offset_bytes)
                record = self._parse(streams[line.file].readline(), line.file, line.offset_bytes)
                if record["id"] != key:
                    raise self._damage_error(line.file, line.offset_bytes)
                yield record

    def distilled(self) -> Iterator[Conversation]:
        """Return an iterator over the kept conversations with their answers, sorted by id."""
        return map(kept_conversation, self.records())

    @property
    def num_others(self) -> int:
        """Return the number of kept conversations whose ids were not given to the constructor."""
        return len(self._others)

    @property
    def shortened(self) -> Counter[str]:
        """Count the kept conversations whose later answers are missing, by reason."""
        return Counter(line.reason for line in self._kept.values() if line.reason)

    @property
    def failed(self) -> Counter[str]:
        """Count the conversations that failed, by reason."""
        return Counter(self._failed.values())

    def fingerprint(self) -> str:
        """Return a SHA-256 of the kept conversations, which does not depend on the order in which they were written."""
        digest = hashlib.sha256()
        for record in self.records():
            line = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
            digest.update(f"{record['id']} {line}\n".encode())
        return digest.hexdigest()

    def files(self) -> list[Path]:
        """Return the files with the kept conversations, sorted by name."""
        return sorted((self._folder / SHARDS).glob("*.jsonl"))

    def _read(self, file: Path) -> None:
        """Read a file's lines, without a last line that is torn or still being written."""
        offset_bytes = 0
        with file.open("rb") as stream:
            for line in takewhile(lambda line: line.endswith(b"\n"), stream):
                self._add_record(self._parse(line, file, offset_bytes), file, offset_bytes)
                offset_bytes += len(line)

    def _add_record(self, record: dict[str, Any], file: Path, offset_bytes: int) -> None:
        """Update the conversations' states with one line of a file; those of `shards/` come first."""
        key = record["id"]
        if self._ids is not None and key not in self._ids:
            self._others.update([key] if file.parent.name == SHARDS else [])
        elif file.parent.name == SHARDS:
            self._kept.setdefault(key, _Line(file, offset_bytes, record["reason"]))
        elif key not in self._kept and "failed" in record:
            self._failed[key] = record["failed"]
        elif key not in self._kept:
            self._answers.setdefault(key, {})[record["turn"]] = record["answer"]

    def _parse(self, line: bytes, file: Path, offset_bytes: int) -> dict[str, Any]:
        """Parse and validate a line; `offset_bytes` is its place, for the error."""
        try:
            return _LINES[file.parent.name].validate_json(line, strict=True)
        except ValidationError as error:
            raise self._damage_error(file, offset_bytes) from error

    def _damage_error(self, file: Path, offset_bytes: int) -> UserError:
        return UserError(
            f"{file} was changed or damaged at byte {offset_bytes}: restore it, or delete {self._folder} to distil "
            "again"
        )


class Ledger(LedgerView):
    """Record of the answers and conversations that are finished or failed, to which one process appends.

    Reading gives what was stored when it was opened, without what was appended since. A missing folder is created.

    Args:
        folder, ids: As of `LedgerView`.
    """

    def __init__(self, folder: Path, ids: Collection[str] | None = None) -> None:
        (folder / UNFINISHED).mkdir(parents=True, exist_ok=True)
        self._files: dict[str, Path] = {}
        super().__init__(folder, ids)

    def is_finished(self, key: str) -> bool:
        """Return whether the conversation with this id is kept or has failed."""
        return key in self._kept or key in self._failed

    def stored_answers(self, key: str) -> list[dict[str, Any]]:
        """Return the stored answers of the unfinished conversation with this id, in the order of its turns."""
        answers = self._answers.get(key, {})
        return [answers[turn] for turn in takewhile(answers.__contains__, count())]

    def commit(
        self,
        answers: list[tuple[str, int, dict[str, Any]]],
        kept: Sequence[Conversation] = (),
        failed: Mapping[str, str] | None = None,
    ) -> None:
        """Write answers (id, number, answer), finished conversations, and reasons of failures by id; wait for the disk.

        Raises:
            OSError: The disk is full; the lines that were on disk before are left unchanged.
        """
        failed, kept_ids = failed or {}, {each.id for each in kept}
        partial = [{"id": key, "turn": turn, "answer": answer} for key, turn, answer in answers if key not in kept_ids]
        self._append(UNFINISHED, [*partial, *({"id": key, "failed": reason} for key, reason in failed.items())])
        self._append(SHARDS, [kept_record(each) for each in kept])

    def retry_failed(self, final: Collection[str] = ()) -> int:
        """Forget all failures but those with a `final` reason, so that they are tried again; return their number."""
        again = [key for key, reason in self._failed.items() if reason not in final]
        for key in again:
            del self._failed[key]
        return len(again)

    def _append(self, kind: str, records: list[dict[str, Any]]) -> None:
        """Add lines to this process's own file, and wait until they are on disk."""
        if not records:
            return
        if kind not in self._files:
            folder = self._folder / kind
            folder.mkdir(exist_ok=True)
            for number in count(1):  # the first that nobody else writes to: `00001.jsonl`, `00002.jsonl`, ...
                self._files[kind] = folder / f"{number:05d}.jsonl"
                with suppress(FileExistsError):
                    self._files[kind].open("xb").close()
                    break
            for changed in (folder, self._folder):  # their lists of files too, where the file system can do that
                with suppress(OSError), ExitStack() as stack:
                    descriptor = os.open(changed, os.O_RDONLY)
                    stack.callback(os.close, descriptor)
                    os.fsync(descriptor)
        lines = b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
        append_whole(self._files[kind], lines)
