"""The KV cache of decoding: the target's, a draft model's, and that of a drafter's layers.

Shapes: L layers, G key-value heads, S columns of the cache, D head size, n rows of a forward, R rows of a mask.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.kernels.cpu_library import has_kernels

ALIGNMENT = 8  # elements
PAGE = 64  # columns
PINNED_NUMBERS = 1 << 16


def aligned(columns: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def zero_mask(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an additive mask of zeros [..., R, S], which hides nothing, with aligned rows."""
    return torch.zeros(*shape[:-1], aligned(shape[-1]), dtype=dtype, device=device)[..., : shape[-1]]


class _PinnedNumbers(threading.local):
    """Pinned memory that a thread's numbers on their way to a GPU go through; each place is used once.

    Pinning every small tensor takes 30 us. A full buffer is given back to torch, which reuses it after its last copy.
    """

    def __init__(self) -> None:
        self._buffer, self._used = torch.empty(0, dtype=torch.int64), 0

    def holding(self, numbers: Tensor) -> Tensor:
        """Return int64 numbers in pinned memory."""
        count = numbers.numel()
        if self._used + count > len(self._buffer):
            with torch.inference_mode(False):  # it is written inside that mode and outside
                self._buffer = torch.empty(max(PINNED_NUMBERS, count), dtype=torch.int64).pin_memory()
            self._used = 0
        place = self._buffer[self._used : self._used + count].view(numbers.shape)
        self._used += count
        return place.copy_(numbers)


_pinned_numbers = _PinnedNumbers()


def _for_device(values: Any, device: torch.device) -> Tensor:
    """Return a tensor, or nested lists of integers as an int64 tensor, in memory that is copied without a wait.

    A copy from ordinary memory waits for all that a GPU has to do; one from pinned memory joins the queue.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda":
        return tensor
    return _pinned_numbers.holding(tensor) if tensor.dtype == torch.int64 else tensor.pin_memory()


def to_device(values: Any, device: torch.device) -> Tensor:
    """Return a tensor, or nested lists of integers of equal lengths as an int64 tensor, on the device."""
    tensor = _for_device(values, device)
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def with_tokens(tokens: list[int] | Tensor, device: torch.device, *others: list[int]) -> tuple[Tensor, ...]:
    """Return tokens [W] and lists of W integers as int64 tensors on the device.

    Args:
        tokens: May be there already: alone [W], or with rows in place of the first lists [n, W].
    """
    if isinstance(tokens, Tensor):
        rows = tokens.view(-1, tokens.shape[-1])
        unknown = list(others[len(rows) - 1 :])
        return (*rows, *to_device(unknown, device)) if unknown else tuple(rows)
    return tuple(to_device([tokens, *others], device))


def write_numbers(held: Tensor, values: Any) -> None:
    """Write nested lists of integers into an int64 tensor that stays, such as an input of a recorded graph."""
    held.copy_(_for_device(values, held.device), non_blocking=True)


def write_level(held: Tensor, tokens: list[int] | Tensor, *others: list[int]) -> None:
    """Write tokens [n] and lists of integers as `write_numbers`, and zeros after.

    Args:
        held: [1 + number of lists, W].
        tokens: As in `with_tokens`.
    """
    width = held.shape[1]
    rows: list[list[int]] = [[] if isinstance(tokens, Tensor) else tokens, *others]
    write_numbers(held, [row + [0] * (width - len(row)) for row in rows])
    if isinstance(tokens, Tensor):
        given = tokens.view(-1, tokens.shape[-1])
        held[: len(given), : given.shape[1]].copy_(given)


class KVCache:
    """Keys and values of all layers, of one sequence or of several that share the columns.

    A sequence's first `lengths[number]` tokens are committed. A forward writes its rows where `write_at` says, after
    these; they are kept by `keep`, or overwritten by the next forward.

    Token t of a single sequence is at column t. Several sequences have pages that take turns, so that the columns in
    use are about `sequences` times the longest: token t of sequence s is at column

        (t // PAGE * sequences + s) * PAGE + t % PAGE

    Args:
        longest_tokens: Most tokens of a sequence, including the rows that a forward writes after it.
    """

    def __init__(self, longest_tokens: int, sequences: int = 1) -> None:
        self.sequences, self.lengths = sequences, [0] * sequences
        step = ALIGNMENT if sequences == 1 else PAGE
        self.longest_tokens = -(-longest_tokens // step) * step
        # One page more, as no compiled forward attends to all columns of several sequences.
        self.capacity = self.longest_tokens if sequences == 1 else self.longest_tokens * sequences + PAGE
        self.keys = self.values = torch.empty(0)  # [L, 1, G, S, D]
        # Views of each layer's. A compiled forward that took them from the whole would copy it, there and back.
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._places: int | Tensor = 0
        self._columns_seen = 0
        self._columns: list[Tensor] = []  # of each sequence's tokens

    @property
    def length(self) -> int:
        """Return the committed tokens of the only sequence, or of the first."""
        return self.lengths[0]

    @length.setter
    def length(self, tokens: int) -> None:
        self.lengths[0] = tokens

    def allocate(self, num_layers: int, key: Tensor, value: Tensor) -> None:
        """Make the memory, for keys and values like these [1, G, n, D]."""
        self.keys, self.values = (
            part.new_zeros(num_layers, *part.shape[:2], self.capacity, part.shape[3]) for part in (key, value)
        )
        self.layers = [(self.keys[index], self.values[index]) for index in range(num_layers)]

    def columns(self, number: int, device: torch.device) -> Tensor:
        """Return the column [longest_tokens] of every token of a sequence."""
        if not self._columns:
            token_t = torch.arange(self.longest_tokens, device=device)
            page_t = token_t // PAGE * self.sequences * PAGE + token_t % PAGE
            several = [page_t + index * PAGE for index in range(self.sequences)]
            self._columns = [token_t] if self.sequences == 1 else several
        return self._columns[number]

    def columns_of_first(self, tokens: int) -> int:
        """Return the number of columns that hold the first tokens of all sequences."""
        return tokens if self.sequences == 1 else -(-tokens // PAGE) * self.sequences * PAGE

    def write_at(self, places: int | Tensor, columns_seen: int) -> None:
        """Make the next forward write its rows at `places` and attend to the first `columns_seen` columns.

        Args:
            places: The column of each row [n], or of the first of adjacent ones.
            columns_seen: 0: the rows attend to themselves alone.
        """
        self._places, self._columns_seen = places, columns_seen

    def update(self, held: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values [1, G, n, D] into those it holds; return those to attend to."""
        places = self._places
        for part, rows in zip(held, new, strict=True):
            if isinstance(places, Tensor):
                part.index_copy_(2, places, rows)
            else:
                part.narrow(2, places, rows.shape[2]).copy_(rows)
        if self._columns_seen == 0:
            return new
        return held[0].narrow(2, 0, self._columns_seen), held[1].narrow(2, 0, self._columns_seen)

    def append(self, keys_values: Tensor) -> None:
        """Commit the keys and values [L, 2, 1, G, n, D] of all layers of n more tokens of the only sequence."""
        new = keys_values.shape[4]
        for part, rows in zip((self.keys, self.values), keys_values.unbind(1), strict=True):
            part.narrow(3, self.length, new).copy_(rows)
        self.length += new

    def keep(self, path: Sequence[int], number: int = 0) -> None:
        """Commit these rows (ascending) of the ones that follow a sequence's committed tokens; forget the others."""
        start = self.lengths[number]
        if path and path[-1] >= len(path):  # some accepted rows must move
            if self.sequences == 1 and self.keys.device.type == "cpu" and has_kernels():
                for part in (self.keys, self.values):
                    torch.ops.draftsmith.keep_rows(part, start, path)
            else:
                self._move(path, number)
        self.lengths[number] = start + len(path)

    def _move(self, path: Sequence[int], number: int) -> None:
        """Move these rows to follow a sequence's committed tokens, by torch's own operations."""
        start = self.lengths[number]
        in_place = next(place for place, row in enumerate(path) if row != place)
        source = to_device(path[in_place:], self.keys.device) + start
        for part in (self.keys, self.values):
            if self.sequences == 1:
                part.narrow(3, start + in_place, len(source)).copy_(part.index_select(3, source))
            else:
                columns = self.columns(number, part.device)
                rows = part.index_select(3, columns[source])
                part.index_copy_(3, columns[start + in_place : start + len(path)], rows)
