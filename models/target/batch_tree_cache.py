"""The KV cache of several sequences at once, each with its own number of committed tokens.

A forward writes the trees of all rows side by side behind the longest row, so that a layer's update stays one copy;
`keep_rows` then moves every row's accepted path to the end of that row. What lies between is hidden by the mask.

Shapes: L layers, A active rows, B rows that fit, H key-value heads, S capacity in tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from draftsmith.models.target.tree_cache import TreeCache


class BatchTreeCache(TreeCache):
    """See the module's docstring. `committed` is the longest row's number of tokens, `lengths` has all [A]."""

    def __init__(self, num_layers: int, capacity_tokens: int, batch_size: int) -> None:
        self.lengths: list[int] = []
        self._batch_size = batch_size
        self._first, self._count = 0, 0  # the rows that layers see
        super().__init__(num_layers, capacity_tokens)

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make room for all rows, given one layer's keys and values [1, H, n, D]."""
        super().allocate(keys.expand(self._batch_size, -1, -1, -1), values.expand(self._batch_size, -1, -1, -1))

    def room_of(self, index: int) -> tuple[Tensor, Tensor]:
        keys, values = super().room_of(index)
        return keys.narrow(0, self._first, self._count), values.narrow(0, self._first, self._count)

    @contextmanager
    def one_row(self, row: int, count: int) -> Iterator[None]:
        """In here a forward of one row adds `count` tokens to it; the row behind the last is a new one."""
        if row == self._batch_size:
            raise ValueError(f"all {self._batch_size} rows are taken: drop one first")
        self._show(row, 1)
        try:
            yield
            self.lengths[row : row + 1] = [self.committed + count]
        finally:
            self._show(0, len(self.lengths))

    def drop(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            for slab in (self.all_keys, self.all_values):
                assert slab is not None
                slab[:, row, :, : self.lengths[last]] = slab[:, last, :, : self.lengths[last]]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._show(0, last)

    def keep_rows(self, paths: list[list[int]]) -> None:
        """Commit one path (root first, ascending) of what the last forward wrote in each row; forget the rest."""
        start = self.committed
        if any(start != length or path[-1] >= len(path) for length, path in zip(self.lengths, paths, strict=True)):
            self._move(start, paths)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        self.committed = max(self.lengths)

    def reset(self) -> None:
        """Forget all rows; the memory stays."""
        super().reset()
        self.lengths = []
        self._show(0, 0)

    def _move(self, start: int, paths: list[list[int]]) -> None:
        assert self.all_keys is not None
        assert self.all_values is not None
        longest = max(map(len, paths))
        # Short paths repeat their last node: copies behind what is committed, which nobody sees.
        nodes = [path + path[-1:] * (longest - len(path)) for path in paths]
        index = torch.tensor([nodes, [list(range(longest))] * len(paths)], device=self.all_keys.device)
        source_ap = index[0] + start
        target_ap = index[1] + torch.tensor(self.lengths, device=index.device)[:, None]
        rows = torch.arange(len(paths), device=index.device)[:, None]
        for slab in (self.all_keys, self.all_values):
            slab[:, rows, :, target_ap] = slab[:, rows, :, source_ap]

    def _show(self, first: int, count: int) -> None:
        """Let the layers see these rows alone."""
        self._first, self._count = first, count
        self.committed = max(self.lengths[first : first + count], default=0)
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:
                layer.keys, layer.values = self.room_of(index)
