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
    """Return [N, M] bool on the host: which of M tree nodes each of the last N sees: its ancestors and itself.

    Args:
        parents: [M] index of each node's parent; negative: the parent is a committed token.
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
    """Return [N, S] bool, True for the columns that a row does not see; token t of the sequence is at column t.

    Args:
        column_s: The columns, ascending.
        position_n: The rows' positions in the sequence.
        length: Number of committed tokens, which every row sees, and the column of the tree's first node.
        seen_nm: As `seen_nodes`, numbers or bool, on the columns' device. None: rows are in causal order.
        window: Number of tokens that a row sees, up to and including its own position; None: all. No tree is as deep,
            so that only committed tokens are outside.
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
    """Return the mask [N, S] that is added to scores, with aligned rows, as CUDA's kernels need them."""
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
    """Return a tensor, or nested lists of integers as an int64 tensor, in memory that is copied without a wait.

    A copy from ordinary memory waits for all that a GPU has to do; one from pinned memory joins the queue.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda" or tensor.device == device:
        return tensor
    return _pinned_numbers.holding(tensor) if tensor.dtype == torch.int64 else tensor.pin_memory()


def to_device(values: Any, device: torch.device) -> Tensor:
    """Return a tensor, or nested lists of integers of equal lengths as an int64 tensor, on the device."""
    tensor = for_device(values, device)
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


# ---- the cache ----


class KVCache:
    """Keys and values of all layers, of one sequence: token t is at column t.

    The first `length` tokens are committed. A forward writes its rows where `write_at` says, after these; they are kept
    by `keep`, or overwritten by the next forward.

    Args:
        tokens: Most tokens of a sequence, including the rows that a forward writes after it.
    """

    def __init__(self, tokens: int) -> None:
        self.length, self.capacity = 0, aligned(tokens)
        self.keys = self.values = torch.empty(0)  # [L, 1, G, S, D]
        # Views of each layer's. A compiled forward that took them from the whole would copy it, there and back.
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.first: int | Tensor = 0
        self._columns_seen = 0

    def allocate(self, num_layers: int, key: Tensor, value: Tensor) -> None:
        """Make the memory, for keys and values like these [1, G, n, D]."""
        self.keys, self.values = (
            part.new_zeros(num_layers, *part.shape[:2], self.capacity, part.shape[3]) for part in (key, value)
        )
        self.layers = [(self.keys[index], self.values[index]) for index in range(num_layers)]

    def write_at(self, first: int | Tensor, columns_seen: int) -> None:
        """Make the next forward write its rows, and attend to the first `columns_seen` columns.

        Args:
            first: The column of the first of adjacent rows; or of each row [N], where graphs are recorded.
            columns_seen: 0: the rows attend to themselves alone.
        """
        self.first, self._columns_seen = first, columns_seen

    def update(self, held: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values [1, G, N, D] into those it holds; return those to attend to."""
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
        """Commit these rows (ascending) of the ones that follow the committed tokens; forget the others."""
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
