"""`ledger.sqlite`: the index of a run's conversations, as a file. What it holds: `ledger.py`."""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftsmith.recipes.errors import UserError

DONE, SHORTENED, FAILED = "done", "truncated", "failed"  # states that stay, as ledgers have them
LEASED, WAITING = "leased", "waiting"
REFUSALS = {
    "full": errno.ENOSPC,
    "disk I/O error": errno.EIO,
    "readonly database": errno.EACCES,
    "unable to open": errno.EACCES,
}
LOCK_TIMEOUT_S = 120.0  # of a writer that waits for another
LEDGER_FILE, SHARDS_FOLDER = "ledger.sqlite", "shards"


def connect(file: Path) -> sqlite3.Connection:
    """Statements commit by themselves, unless a transaction is begun."""
    # The rollback journal works on network file systems too, the write-ahead log does not.
    with translate_errors(file):
        connection = sqlite3.connect(file, timeout=LOCK_TIMEOUT_S, isolation_level=None)
        connection.execute("PRAGMA synchronous = FULL")
    return connection


@contextmanager
def translate_errors(file: Path) -> Iterator[None]:
    """SQLite's errors as ours.

    Raises:
        OSError: The disk is full or fails, or may not be written to.
        UserError: The file is damaged, or held for too long by another program.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        for said, number in REFUSALS.items():
            if said in str(error):
                raise OSError(number, os.strerror(number), str(file)) from None
        raise UserError(
            f"{file}: {error}: another program may hold it; stop that and run the same command again"
        ) from None
    except sqlite3.DatabaseError as error:
        raise UserError(
            f"{file} is damaged ({error}): delete it and run the same command again; it is made anew from "
            f"{file.parent / SHARDS_FOLDER}"
        ) from None
