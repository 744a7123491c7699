"""Xet's storage as hf_xet uploads to it, written from the protocol's specification (huggingface.co/docs/xet).

A xorb is a row of chunks, each behind a header of 8 bytes: version, compressed size, scheme (0 none, 1 LZ4, 2 LZ4 of
bytes grouped by their place in 4), size. A shard says of each file which chunks of which xorbs it is made of, and its
SHA-256. Hashes stand in addresses as four little-endian numbers of 64 bits.
"""

import hashlib
import struct
from typing import Any

import numpy as np
import pyarrow

SHARD_HEADER_BYTES, ENTRY_BYTES = 48, 48
BOOKEND = b"\xff" * 32
WITH_VERIFICATION, WITH_METADATA = 1 << 31, 1 << 30
# What hf_xet is asked to speak: version 1 of the protocol, which is the published one; and to give up at once.
ENVIRONMENT = {
    "HF_XET_CLIENT_LEGACY_DIRECT_XORB_UPLOAD": "true",
    "HF_XET_CLIENT_SHARD_API_VERSION": "1",
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms",
}


class XetStore:
    """xorbs: chunks by the xorb's hash, as it stands in addresses."""

    def __init__(self) -> None:
        self.xorbs: dict[str, list[bytes]] = {}

    def take_xorb(self, address: str, data: bytes) -> None:
        self.xorbs[address] = list(_chunks(data))

    def files(self, shard: bytes) -> list[bytes]:
        """What the shard's files are made of.

        Raises:
            ValueError: A file has not the SHA-256 that the shard gives it.
        """
        found, place = [], SHARD_HEADER_BYTES
        while (entry := shard[place : place + ENTRY_BYTES])[:32] != BOOKEND:
            flags, count = struct.unpack_from("<II", entry, 32)
            place += ENTRY_BYTES
            data = b"".join(self._term(shard[place + n * ENTRY_BYTES :][:ENTRY_BYTES]) for n in range(count))
            place += ENTRY_BYTES * count * (2 if flags & WITH_VERIFICATION else 1)
            if flags & WITH_METADATA:
                if _address(shard[place : place + 32]) != hashlib.sha256(data).hexdigest():
                    raise ValueError("a file of other bytes")
                place += ENTRY_BYTES
            found.append(data)
        return found

    def _term(self, entry: bytes) -> bytes:
        _, size, first, end = struct.unpack_from("<4I", entry, 32)
        data = b"".join(self.xorbs[_address(entry[:32])][first:end])
        assert len(data) == size
        return data


def _address(digest: bytes) -> str:
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))


def _chunks(xorb: bytes) -> Any:
    place = 0
    while place < len(xorb):
        compressed, scheme = int.from_bytes(xorb[place + 1 : place + 4], "little"), xorb[place + 4]
        size = int.from_bytes(xorb[place + 5 : place + 8], "little")
        data = xorb[place + 8 : place + 8 + compressed]
        place += 8 + compressed
        if scheme:
            data = pyarrow.Codec("lz4").decompress(data, size).to_pybytes()
        yield _ungrouped(data) if scheme == 2 else data


def _ungrouped(data: bytes) -> bytes:
    groups = np.array_split(np.frombuffer(data, np.uint8), 4)  # the first ones are longer by one
    whole = np.empty(len(data), np.uint8)
    for number, group in enumerate(groups):
        whole[number::4] = group
    return whole.tobytes()
