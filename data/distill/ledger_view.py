"""What was distilled, for those who only read it. A distillation at work is not disturbed."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.distill.ledger_db import LEDGER_FILE, SHARDS_FOLDER, connect, translate_errors
from draftsmith.data.distill.shards import Place, ShardReader
from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.recipes.errors import UserError

PAGE_ROWS = 4096


class LedgerView:
    """What a run's data folder holds.

    Raises:
        UserError: Nothing was distilled there yet, or the ledger is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._shards = folder / LEDGER_FILE, folder / SHARDS_FOLDER
        begun = self._file.exists() and self._query("SELECT name FROM sqlite_master WHERE name = 'workers'")
        if not begun:
            raise UserError(f"{self._file} does not exist: run `draftsmith distill` with the same recipe first")

    def records(self) -> Iterator[dict[str, Any]]:
        """Kept conversations, sorted by id: the order does not depend on interruptions. One is in memory at a time."""
        yield from ShardReader(self._shards).read(self._places())

    def _places(self) -> Iterator[Place]:
        """In pages, since a query that is open keeps a distillation at work from writing."""
        last = ""
        while page := self._query(
            "SELECT id, shard, offset_bytes, length_bytes FROM conversations WHERE shard IS NOT NULL AND id > ? "
            f"ORDER BY id LIMIT {PAGE_ROWS}",
            (last,),
        ):
            last = page[-1][0]
            yield from (Place(*row[1:]) for row in page)

    def __len__(self) -> int:
        """How many conversations were kept."""
        return self._query("SELECT COUNT(*) FROM conversations WHERE shard IS NOT NULL")[0][0]

    def counts(self) -> dict[str, Counter[str]]:
        """For each state: how many conversations, by reason (`""` where there is none)."""
        counts: dict[str, Counter[str]] = {}
        for state, reason, number in self._query(
            "SELECT state, COALESCE(reason, ''), COUNT(*) FROM conversations GROUP BY state, reason"
        ):
            counts.setdefault(state, Counter())[reason] = number
        return counts

    def attempts(self) -> dict[int, int]:
        """How many conversations were settled after how many attempts."""
        return dict(self._query("SELECT attempts, COUNT(*) FROM conversations WHERE attempts > 0 GROUP BY attempts"))

    def fingerprint(self) -> str:
        """A hash of all that was kept, whatever the order in which it was written."""
        digest = hashlib.sha256()
        for key, line in self._query("SELECT id, digest FROM conversations WHERE shard IS NOT NULL ORDER BY id"):
            digest.update(f"{key} {line}\n".encode())
        return digest.hexdigest()

    def _query(self, sql: str, values: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
        with translate_errors(self._file):
            connection = connect(self._file)
            try:
                return connection.execute(sql, values).fetchall()
            finally:
                connection.close()


@dataclass(frozen=True)
class Distilled:
    """A conversation with the target's answers; for each its token ids (end token included), where they are known.

    `shortened` says why it lost its later turns, if it did.
    """

    conversation: Conversation
    answer_ids: list[list[int] | None]
    shortened: str | None = None


def read_distilled(folder: Path) -> Iterator[Distilled]:
    """The conversations that were kept, sorted by id: the order does not depend on interruptions.

    Raises:
        UserError: There are none yet.
    """
    for record in LedgerView(folder).records():
        turns = tuple(Turn(message["role"], message["content"]) for message in record["messages"])
        answers = sum(turn.role == "assistant" for turn in turns)
        conversation = Conversation(record["id"], turns, record.get("source", ""))
        yield Distilled(conversation, record.get("answer_ids") or [None] * answers, record["reason"])
