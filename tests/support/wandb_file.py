"""Read wandb's offline files: records in LevelDB's log format after a header of 7 bytes.

wandb's own reader is in Go since version 0.31.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES, FILE_HEADER_BYTES, HEADER_BYTES = 1 << 15, 7, 7
FULL, FIRST, LAST = 1, 2, 4


def wandb_records(root: Path) -> dict[str, list[Any]]:
    """Return the records of all offline runs in `root/wandb`, by type, in order."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service writes asynchronously
    found: dict[str, list[Any]] = {}
    for file in sorted((root / "wandb").glob("offline-run-*/*.wandb")):
        for data in _messages(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            found.setdefault(kind, []).append(getattr(record, kind))
    return found


def items_of(records: list[Any], field: str) -> dict[str, list[Any]]:
    """Return values by key, in order."""
    values: dict[str, list[Any]] = {}
    for record in records:
        for item in getattr(record, field):
            values.setdefault("/".join(item.nested_key) or item.key, []).append(json.loads(item.value_json))
    return values


def _messages(data: bytes) -> Iterator[bytes]:
    """Yield messages of one or several records; none starts where a block has no room for a header."""
    place, message = FILE_HEADER_BYTES, b""
    while place + HEADER_BYTES <= len(data):
        room = BLOCK_BYTES - place % BLOCK_BYTES
        if room < HEADER_BYTES:
            place += room
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part = data[place + HEADER_BYTES : place + HEADER_BYTES + length]
        message = part if kind in (FULL, FIRST) else message + part
        if kind in (FULL, LAST):
            yield message
        place += HEADER_BYTES + length
