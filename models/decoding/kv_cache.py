"""The KV cache of decoding, the target's, a draft model's and that of a drafter's layers, and what its rows see.

A row is a computed position: a token of a prompt, or a node of a draft tree after the committed tokens. A tree has one
encoding, the parent of each of its nodes; all masks are made of it by `seen_nodes` and `hidden_columns`.

Shapes: L layers, G key-value heads, S columns of the cache, D head size, N rows of a forward, M nodes of a tree.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.kernels.cpu_kernels import has_kernels

LONGEST_TREE_NODES = 256
ALIGNMENT = 8  # elements
PINNED_NUMBERS = 1 << 16


def aligned(columns: int) -> int:
    """Round a number of columns up to a multiple of `ALIGNMENT`."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


# ---- what a row sees ----


@lru_cache(maxsize=4096)
def seen_nodes(parents: tuple[int, ...], num_rows: int) -> Tensor:
    """Return a bool mask [N, M] on the host: the last N of M tree nodes each see their ancestors and themselves.

    Args:
        parents: [M] number of each node's parent; negative: the parent is a committed token.
    """
    # Bytes instead of tensors: best-first trees have a new shape nearly every round, and this takes 5 us for 13 nodes,
    # 10 for 33 and 12 for 65, where doubling ancestors with gathers takes 17.
    nodes = len(parents)
    rows: list[bytearray] = []
    for node, parent in enumerate(parents):
        rows.append(bytearray(nodes) if parent < 0 else bytearray(rows[parent]))
        rows[node][node] = 1
    return torch.frombuffer(bytearray().join(rows[nodes - num_rows :]), dtype=torch.bool).view(num_rows, nodes)


def hidden_columns(
    column_s: Tensor, position_n: Tensor, length: int | Tensor, seen_nm: Tensor | None, window: int | None = None
) -> Tensor:
    """Return a bool mask [N, S], True where a row must not attend to a column of the KV cache.

    Args:
        column_s: Numbers [S] of the columns, ascending; token t of the sequence is at column t.
        position_n: Positions [N] of the rows in the sequence.
        length: Number of committed tokens, which every row sees; the tree's first node is at this column.
        seen_nm: Mask [N, M] from `seen_nodes`, int or bool, on the columns' device. None: rows are in causal order.
        window: Number of tokens that a row sees, up to and including its own position; None: all. It must exceed the
            depth of the tree, so that only committed tokens are outside.
    """
    if seen_nm is None:
        hidden = column_s > position_n[:, None]
    elif isinstance(length, int) and len(column_s) == length + seen_nm.shape[1]:
        hidden = F.pad(seen_nm == 0, (length, 0))  # the same in few operations
    else:
        node_s = column_s - length
        is_seen = seen_nm.index_select(1, node_s.clamp(0, seen_nm.shape[1] - 1)) != 0
        hidden = (node_s >= 0) & ~(is_seen & (node_s < seen_nm.shape[1]))
    if window is not None:
        hidden = hidden | (column_s <= position_n[:, None] - window)
    return hidden


def additive_mask(hidden_ns: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask [N, S] (True: hidden) into one to add to scores, with rows aligned for CUDA's kernels."""
    rows, columns = hidden_ns.shape
    mask = torch.zeros(rows, aligned(columns), dtype=dtype, device=hidden_ns.device)[:, :columns]
    return mask.masked_fill_(hidden_ns, torch.finfo(dtype).min)


# ---- numbers on their way to a device ----


class _PinnedNumbers(threading.local):
    """Pinned memory that a thread's numbers on their way to a GPU go through; each place is used once.

    Pinning every small tensor takes 30 us. A full buffer is given back to torch, which reuses it after its last copy.
    """

    def __init__(self) -> None:
        self._buffer, self._used = torch.empty(0, dtype=torch.int64), 0

    def holding(self, numbers: Tensor) -> Tensor:
        """Copy int64 numbers into pinned memory; return the copy."""
        count = numbers.numel()
        if self._used + count > len(self._buffer):
            with torch.inference_mode(False):  # it is written inside that mode and outside
                self._buffer = torch.empty(max(PINNED_NUMBERS, count), dtype=torch.int64).pin_memory()
            self._used = 0
        place = self._buffer[self._used : self._used + count].view(numbers.shape)
        self._used += count
        return place.copy_(numbers)


_pinned_numbers = _PinnedNumbers()


def for_device(values: Any, device: torch.device) -> Tensor:
    """Return a tensor (or nested lists of ints, as int64) in pinned memory if it is to be copied to CUDA.

    A copy from ordinary memory waits until the GPU has done all its work; one from pinned memory is queued.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda" or tensor.device == device:
        return tensor
    return _pinned_numbers.holding(tensor) if tensor.dtype == torch.int64 else tensor.pin_memory()


def to_device(values: Any, device: torch.device) -> Tensor:
    """Return a tensor (or nested lists of ints, as int64) on the device; the copy does not wait for the GPU."""
    tensor = for_device(values, device)
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


# ---- the cache ----


class KVCache:
    """KV cache of all layers for one sequence; token t is at column t.

    The first `length` tokens are committed. A forward writes the keys and values of its rows after these, where
    `write_at` says; `keep` commits rows, and the next forward overwrites the others.

    Args:
        tokens: Largest number of tokens, the rows that a forward writes after the sequence included.
    """

    def __init__(self, tokens: int) -> None:
        self.length, self.capacity = 0, aligned(tokens)
        self.keys = self.values = torch.empty(0)  # [L, 1, G, S, D]
        # Views of each layer's. A compiled forward that took them from the whole would copy it, there and back.
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.first: int | Tensor = 0
        self._columns_seen = 0

    def allocate(self, num_layers: int, key: Tensor, value: Tensor) -> None:
        """Allocate the memory; `key` and `value` [1, G, n, D] are examples for sizes, dtype and device."""
        self.keys, self.values = (
            part.new_zeros(num_layers, *part.shape[:2], self.capacity, part.shape[3]) for part in (key, value)
        )
        self.layers = [(self.keys[index], self.values[index]) for index in range(num_layers)]

    def write_at(self, first: int | Tensor, columns_seen: int) -> None:
        """Set the columns that the next forward writes, and how many of the first columns it attends to.

        Args:
            first: Column of the first row, if rows are adjacent; or columns [N] of all rows, for CUDA graphs.
            columns_seen: Number of columns; 0: the rows attend only to the rows of this forward.
        """
        self.first, self._columns_seen = first, columns_seen

    def update(self, held: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Write new keys and values [1, G, N, D] into `held`, a layer's memory; return those to attend to."""
        first = self.first
        for part, rows in zip(held, new, strict=True):
            if isinstance(first, Tensor):
                part.index_copy_(2, first, rows.detach())
            else:
                part.narrow(2, first, rows.shape[2]).copy_(rows.detach())
        if self._columns_seen == 0:
            return new
        return held[0].narrow(2, 0, self._columns_seen), held[1].narrow(2, 0, self._columns_seen)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Commit the keys and values [L, 1, G, n, D] of all layers of n more tokens."""
        new = keys.shape[3]
        self.keys.narrow(3, self.length, new).copy_(keys)
        self.values.narrow(3, self.length, new).copy_(values)
        self.length += new

    def keep(self, path: Sequence[int]) -> None:
        """Commit the rows of `path` (ascending numbers, from the end of the committed tokens); drop all others."""
        if path and path[-1] >= len(path):  # some accepted rows must move
            if self.keys.device.type == "cpu" and has_kernels():
                for part in (self.keys, self.values):
                    torch.ops.draftsmith.keep_rows(part, self.length, path)
            else:
                in_place = next(place for place, row in enumerate(path) if row != place)
                source = to_device(path[in_place:], self.keys.device) + self.length
                for part in (self.keys, self.values):
                    part.narrow(3, self.length + in_place, len(source)).copy_(part.index_select(3, source))
        self.length += len(path)
