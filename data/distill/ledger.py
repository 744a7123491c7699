"""Who is working on which conversation of a run folder, and what became of it: `ledger.sqlite` beside `shards/`.

    shards/<worker>-<part>.jsonl    finished conversations, append-only; each process writes files of its own
    ledger.sqlite                   an index of them: of each conversation its state, the reason, the attempts and where
                                    its line lies; the answers so far of those at work; who is at work

Killed at any moment, SIGKILL included, a process loses at most the answers that it had not committed: a conversation's
line is on disk before the ledger says so, and a line that the ledger does not know yet is found again. No conversation
counts twice, because only the ledger's line of it is ever read.

Several processes may work on one folder. A conversation is leased to one of them; the leases of a dead one fall to the
others. Dead is whose process is gone (on the same host), or whose heartbeat has stood still for `LEASE_S` seconds *of
the observer's monotonic clock*: no clock is ever compared with another, so that a jump of one changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from draftsmith.data.distill.ledger_db import (
    DONE,
    FAILED,
    LEASED,
    LEDGER_FILE,
    SHARDS_FOLDER,
    SHORTENED,
    WAITING,
    connect,
    translate_errors,
)
from draftsmith.data.distill.shards import Place, ShardReader, ShardWriter
from draftsmith.recipes.errors import UserError

LEASE_S = 60.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, state TEXT NOT NULL, reason TEXT, attempts INTEGER NOT NULL DEFAULT 0, worker INTEGER,
    shard TEXT, offset_bytes INTEGER, length_bytes INTEGER, digest TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_worker ON conversations (worker) WHERE worker IS NOT NULL;
CREATE TABLE IF NOT EXISTS answers (
    id TEXT NOT NULL, turn INTEGER NOT NULL, answer TEXT NOT NULL, PRIMARY KEY (id, turn)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS workers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, host TEXT NOT NULL, pid INTEGER NOT NULL, beat INTEGER NOT NULL DEFAULT 0
);
"""


@dataclass(frozen=True)
class Finished:
    """What became of a conversation. `record` is its line; None for a failed one."""

    id: str
    state: str
    reason: str | None = None
    record: dict[str, Any] | None = None


@dataclass
class Lease:
    """What a worker was given: ids with the answers that they have already, and ids that another worker holds."""

    taken: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)


class Ledger:
    """One process's hold on a run's data folder.

    Args:
        folder: `runs/<name>/data`; made if it is not there.

    Raises:
        UserError: The ledger is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._connection = connect(folder / LEDGER_FILE)
        self._reader = ShardReader(folder / SHARDS_FOLDER)
        self._beats: dict[int, tuple[int, float]] = {}  # of the others: the last beat, and when it was first seen
        try:
            self.worker = self._register()
        except BaseException:
            self._connection.close()
            raise
        self._writer = ShardWriter(folder / SHARDS_FOLDER, f"{self.worker:05d}")
        self._closing = threading.Event()
        self._heartbeat = threading.Thread(target=self._keep_beating, name="lease heartbeat", daemon=True)
        self._heartbeat.start()

    def close(self) -> None:
        """Give back what is leased; its answers stay."""
        self._closing.set()
        self._heartbeat.join()
        try:
            with self._transaction():
                self._release(self.worker)
        finally:
            self._connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lease(self, ids: Iterable[str]) -> Lease:
        """Take those conversations that nobody has finished and no living worker holds."""
        lease = Lease()
        with self._transaction():
            self._release_dead_workers()
            for key in ids:
                row = self._connection.execute("SELECT state FROM conversations WHERE id = ?", (key,)).fetchone()
                if row is None:
                    self._connection.execute(
                        "INSERT INTO conversations (id, state, worker) VALUES (?, ?, ?)", (key, LEASED, self.worker)
                    )
                elif row[0] == WAITING:
                    self._connection.execute(
                        "UPDATE conversations SET state = ?, worker = ? WHERE id = ?", (LEASED, self.worker, key)
                    )
                else:
                    if row[0] == LEASED:
                        lease.held.append(key)
                    continue
                answers = self._rows("SELECT answer FROM answers WHERE id = ? ORDER BY turn", key)
                lease.taken[key] = [json.loads(answer) for (answer,) in answers]
        return lease

    def commit(self, answers: list[tuple[str, int, dict[str, Any]]], finished: list[Finished]) -> set[str]:
        """Write answers (id, turn, what was said) and finished conversations down, for good.

        Returns:
            The ids that this worker no longer holds (it was taken for dead); nothing of them was written.
        """
        if not answers and not finished:
            return set()
        with self._transaction():
            concerned = {key for key, _, _ in answers} | {conversation.id for conversation in finished}
            held = self._rows("SELECT id FROM conversations WHERE worker = ?", self.worker)
            mine = concerned.intersection(key for (key,) in held)
            rows = [(key, turn, json.dumps(answer)) for key, turn, answer in answers if key in mine]
            self._connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", rows)
            ended = [conversation for conversation in finished if conversation.id in mine]
            records = [
                {
                    "id": conversation.id,
                    "state": conversation.state,
                    "reason": conversation.reason,
                    **conversation.record,
                }
                for conversation in ended
                if conversation.record is not None
            ]
            for record, place in zip(records, self._writer.append(records), strict=True):
                self._index(record, place)
            for conversation in ended:
                if conversation.record is None:
                    self._settle(conversation.id, conversation.state, conversation.reason)
        return concerned - mine

    def retry_failed(self, final: Collection[str] = ()) -> int:
        """Conversations that failed for other than `final` reasons wait again; how many. Attempts are not forgotten."""
        places = ", ".join("?" * len(final))
        with self._transaction():
            return self._connection.execute(
                f"UPDATE conversations SET state = ? WHERE state = ? AND reason NOT IN ({places})",
                (WAITING, FAILED, *final),
            ).rowcount

    def finished_ids(self) -> set[str]:
        """Conversations that nothing is to be done about any more."""
        states = (DONE, SHORTENED, FAILED)
        return {key for (key,) in self._rows(f"SELECT id FROM conversations WHERE state IN {states}")}

    def _register(self) -> int:
        """This worker's number."""
        with self._transaction():
            for statement in filter(str.strip, SCHEMA.split(";")):
                self._connection.execute(statement)
            values = (_host(), os.getpid())
            number = self._connection.execute("INSERT INTO workers (host, pid) VALUES (?, ?)", values).lastrowid
            self._index_unknown_lines()
        assert number is not None
        return number

    def _rows(self, sql: str, *values: Any) -> list[Any]:
        """Without the cursor: one that outlives the connection, in a traceback that is kept, keeps the file locked."""
        return self._connection.execute(sql, values).fetchall()

    # --- inside a transaction ---

    def _index(self, record: dict[str, Any], place: Place) -> None:
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        where = (place.shard, place.offset_bytes, place.length_bytes, digest)
        self._settle(record["id"], record["state"], record["reason"], where)

    def _settle(
        self, key: str, state: str, reason: str | None, where: tuple[Any, ...] = (None, None, None, None)
    ) -> None:
        self._connection.execute(
            "INSERT INTO conversations VALUES (?, ?, ?, 1, NULL, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "state = excluded.state, reason = excluded.reason, attempts = attempts + 1, worker = NULL, shard = "
            "excluded.shard, offset_bytes = excluded.offset_bytes, length_bytes = excluded.length_bytes, "
            "digest = excluded.digest",
            (key, state, reason, *where),
        )
        if state != FAILED:  # whose answers so far are there for another try
            self._connection.execute("DELETE FROM answers WHERE id = ?", (key,))

    def _release_dead_workers(self) -> None:
        """The conversations of workers that are gone wait again, but for those whose lines were on disk already."""
        holders = self._rows("SELECT DISTINCT worker FROM conversations WHERE worker IS NOT NULL")
        dead = [worker for (worker,) in holders if worker != self.worker and self._is_dead(worker)]
        if dead:
            self._index_unknown_lines()
        for worker in dead:
            self._release(worker)

    def _is_dead(self, worker: int) -> bool:
        host, pid, beat = self._connection.execute(
            "SELECT host, pid, beat FROM workers WHERE number = ?", (worker,)
        ).fetchone()
        if host == _host() and (pid == os.getpid() or not _is_running(pid)):
            return True
        now = time.monotonic()
        seen, since = self._beats.get(worker, (None, now))
        self._beats[worker] = (beat, since if seen == beat else now)
        return seen == beat and now - since > LEASE_S

    def _release(self, worker: int) -> None:
        self._connection.execute(
            "UPDATE conversations SET state = ?, worker = NULL WHERE worker = ?", (WAITING, worker)
        )

    def _index_unknown_lines(self) -> None:
        """Lines behind those the ledger knows: their writer was killed before it could say so, or the ledger is new."""
        known = dict(
            self._rows(
                "SELECT shard, MAX(offset_bytes + length_bytes + 1) FROM conversations WHERE shard IS NOT NULL "
                "GROUP BY shard"
            )
        )
        for shard in self._reader.names():
            for place, record in self._reader.lines_after(shard, known.get(shard, 0)):
                row = self._connection.execute(
                    "SELECT state FROM conversations WHERE id = ?", (record["id"],)
                ).fetchone()
                if row is None or row[0] in (LEASED, WAITING):
                    self._index(record, place)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with translate_errors(self._folder / LEDGER_FILE):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has rolled it back already
                    self._connection.execute("ROLLBACK")
                raise

    def _keep_beating(self) -> None:
        while not self._closing.wait(LEASE_S / 6):
            # A full disk or a long lock is the main thread's to tell; a beat left out is no harm.
            refusals = suppress(sqlite3.OperationalError, OSError, UserError)
            with refusals, closing(connect(self._folder / LEDGER_FILE)) as connection:
                connection.execute("UPDATE workers SET beat = beat + 1 WHERE number = ?", (self.worker,))


@lru_cache(maxsize=1)
def _host() -> str:
    """Those who have it in common see each other's process ids: hosts, and containers of one host, may share a name."""
    namespace = Path("/proc/self/ns/pid")
    boot = Path("/proc/sys/kernel/random/boot_id")
    linux = [os.readlink(namespace), boot.read_text().strip()] if namespace.exists() and boot.exists() else []
    return " ".join([socket.gethostname(), *linux])


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
