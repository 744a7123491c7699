"""The state of each conversation of a run folder: append-only files of JSON lines, each with one writer.

    shards/<n>.jsonl        finished conversations with their answers, from which the token dataset is built
    unfinished/<n>.jsonl    answers of unfinished conversations, and failures
    claims.lock             a process locks one byte of it for each conversation that it is working on

A line counts only if it ends with a newline; if `shards/` has several lines of a conversation, the first one counts. So
a process that is killed at any moment, SIGKILL included, loses at most the answers that it had not committed.

Several processes may work on one folder, also on several hosts if their file system has locks (NFS 4, Lustre). The
operating system releases a dead process's locks. A process that gets a lock reads the new lines before it starts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.sources.distilled import SHARDS, DistilledLine, kept_conversation, kept_record
from draftsmith.errors import UserError
from draftsmith.files import append_whole

UNFINISHED, CLAIMS = "unfinished", "claims.lock"


class _StoredAnswer(TypedDict):
    text: str
    token_ids: list[int] | None


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


class Claim(NamedTuple):
    """Claimed conversations by id, with their stored answers, and the ids that another process works on."""

    claimed: dict[str, list[dict[str, Any]]]
    held: list[str]


class _Line(NamedTuple):
    """Place of a kept conversation's line, and why later answers are missing."""

    file: Path
    offset_bytes: int
    reason: str | None


class LedgerView:
    """Read-only view of the ledger of a run's data folder.

    Args:
        folder: `runs/<name>/data`.
        ids: Conversations to read; the kept ones among the others are only counted, as `num_others`. None: all.

    Raises:
        UserError: Nothing was distilled yet, or a file is damaged.
    """

    def __init__(self, folder: Path, ids: Collection[str] | None = None) -> None:
        if not (folder / SHARDS).exists() and not (folder / CLAIMS).exists():
            raise UserError(f"{folder / SHARDS} does not exist: run `draftsmith distill` with the same recipe first")
        self._folder, self._ids = folder, ids
        self._others: set[str] = set()
        self._kept: dict[str, _Line] = {}
        self._failed: dict[str, str] = {}
        self._answers: dict[str, dict[int, dict[str, Any]]] = {}
        self._read_bytes: Counter[Path] = Counter()
        self._refresh()

    def __len__(self) -> int:
        """Count the kept conversations."""
        return len(self._kept)

    def records(self) -> Iterator[dict[str, Any]]:
        """Read the kept conversations, one at a time, sorted by id: the order does not depend on interruptions.

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
        """Read the kept conversations with their answers, in the order of `records`."""
        return map(kept_conversation, self.records())

    @property
    def num_others(self) -> int:
        """Count the kept conversations that are not among the ids."""
        return len(self._others)

    @property
    def shortened(self) -> Counter[str]:
        """Count the kept conversations without their later answers, by reason."""
        return Counter(line.reason for line in self._kept.values() if line.reason)

    @property
    def failed(self) -> Counter[str]:
        """Count the conversations that failed, by reason."""
        return Counter(self._failed.values())

    def fingerprint(self) -> str:
        """Hash the kept conversations, whatever the order in which they were written."""
        digest = hashlib.sha256()
        for record in self.records():
            line = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
            digest.update(f"{record['id']} {line}\n".encode())
        return digest.hexdigest()

    def files(self) -> list[Path]:
        """List the files of kept conversations."""
        return sorted((self._folder / SHARDS).glob("*.jsonl"))

    def _refresh(self) -> None:
        """Read the lines written since the last call, without a last line that is torn or still being written."""
        for file in [*self.files(), *sorted((self._folder / UNFINISHED).glob("*.jsonl"))]:
            with file.open("rb") as stream:
                stream.seek(self._read_bytes[file])
                for line in takewhile(lambda line: line.endswith(b"\n"), stream):
                    self._add_record(self._parse(line, file, self._read_bytes[file]), file)
                    self._read_bytes[file] += len(line)

    def _add_record(self, record: dict[str, Any], file: Path) -> None:
        """Update the conversations' states with one line of a file."""
        key = record["id"]
        if self._ids is not None and key not in self._ids:
            self._others.update([key] if file.parent.name == SHARDS else [])
        elif file.parent.name == SHARDS:
            self._kept.setdefault(key, _Line(file, self._read_bytes[file], record["reason"]))
            self._failed.pop(key, None)
            self._answers.pop(key, None)
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
    """Ledger of one process, which makes a run's data folder if it is missing."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._claims = (folder / CLAIMS).open("ab")
        self._files: dict[str, Path] = {}
        super().__init__(folder)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self._claims.close()

    def is_finished(self, key: str) -> bool:
        """Return whether a conversation is kept or has failed."""
        return key in self._kept or key in self._failed

    def claim(self, ids: Iterable[str]) -> Claim:
        """Claim the conversations that are not finished and that no living process works on.

        Raises:
            UserError: The file system has no locks.
        """
        claim = Claim({}, [])
        locked: list[str] = []
        for key in ids:
            (locked if self._lock(key) else claim.held).append(key)
        self._refresh()
        for key in locked:
            if self.is_finished(key):
                self._unlock(key)
                continue
            answers = self._answers.get(key, {})
            claim.claimed[key] = [answers[turn] for turn in takewhile(answers.__contains__, count())]
        return claim

    def commit(
        self,
        answers: list[tuple[str, int, dict[str, Any]]],
        kept: Sequence[Conversation] = (),
        failed: Mapping[str, str] | None = None,
    ) -> None:
        """Write answers (id, turn, answer), conversations and reasons of failures by id; wait until they are on disk.

        Raises:
            OSError: The disk is full; the lines that were on disk before are left unchanged.
        """
        failed, kept_ids = failed or {}, {each.id for each in kept}
        partial = [{"id": key, "turn": turn, "answer": answer} for key, turn, answer in answers if key not in kept_ids]
        self._append(UNFINISHED, [*partial, *({"id": key, "failed": reason} for key, reason in failed.items())])
        self._append(SHARDS, [kept_record(each) for each in kept])
        for key in (*kept_ids, *failed):
            self._unlock(key)
        self._refresh()

    def retry_failed(self, final: Collection[str] = ()) -> int:
        """Make conversations that failed claimable again, except for `final` reasons. Returns their number."""
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
            for changed in (folder, self._folder):
                _sync_folder(changed)
        lines = b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
        append_whole(self._files[kind], lines)

    def _lock(self, key: str) -> bool:
        """Lock a conversation for this process. Returns False if another process has locked it."""
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte_of(key))
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise UserError(
                f"{self._folder / CLAIMS} cannot be locked ({error.strerror}): set runs_dir to a folder on a file "
                "system that has locks"
            ) from None
        return True

    def _unlock(self, key: str) -> None:
        fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, _byte_of(key))


def _sync_folder(folder: Path) -> None:
    """Wait until a folder's list of files is on disk, where the file system can do that."""
    with suppress(OSError), ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)


def _byte_of(key: str) -> int:
    """Return the place of a conversation's lock in `claims.lock`: 62 bits of a hash of its id."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 2
