"""The masks of a part of the groups at a time, for sequences whose activations of all masks do not fit.

A group depends on the real tokens and on nothing else. So stream 0 goes through the layers once and leaves its keys
and values; then the masks of some groups after those of others, each part's forward followed by its backward
(`base/in_parts.py`). With some parts for each mask there is, none has more rows than there are tokens.

Shapes: T tokens that attention works on, K masks of a group, C positions of a part, n rows of it, H heads, Hkv
key/value heads, R rows of a call, Dh head size.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.groups.attention import Past, group_attention
from draftsmith.models.groups.documents import Documents
from draftsmith.models.groups.rows import Grid


@dataclass(frozen=True)
class Part:
    """Positions `begin` to `end` of the T.

    documents: What they consist of, in the part's own positions. past_begin: Where the first of these began, of which
    the first `past_queries` positions go on.
    """

    begin: int
    end: int
    documents: Documents
    past_begin: int
    past_queries: int


def parts_of(documents: Documents, num_parts: int) -> list[Part]:
    """T positions in so many parts of about one length; none is empty. Waits for the device."""
    ends, total = [], 0
    for length in documents.lengths:
        total += length
        ends.append(total)
    size = max(1, -(-total // num_parts))
    device, parts = documents.bounds_d.device, []
    for begin in range(0, total, size):
        end = min(begin + size, total)
        inner = sorted({begin, end, *(bound for bound in ends if begin < bound < end)})
        longest = max(right - left for left, right in itertools.pairwise(inner))
        past_begin = max((bound for bound in (0, *ends) if bound <= begin), default=0)
        bounds_d = torch.tensor([bound - begin for bound in inner], dtype=torch.int32)
        there = Documents(bounds_d.to(device, non_blocking=True), longest)
        parts.append(Part(begin, end, there, past_begin, inner[1] - begin if past_begin < begin else 0))
    return parts


class RealStream:
    """Attention of stream 0, whose keys and values are kept for the parts."""

    def __init__(self, grid: Grid, backend: str) -> None:
        self._grid, self._backend = grid, backend
        self.keys_values: list[tuple[Tensor, Tensor]] = []  # of each layer, [1, Hkv, 1, T, Dh]

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[1, R, H, Dh] for queries [1, H, R, Dh], keys and values [1, Hkv, R, Dh] of all its rows."""
        grid = self._grid
        k, v = grid.to_grid(k_bhrd), grid.to_grid(v_bhrd)
        self.keys_values.append((k, v))
        return grid.from_grid(group_attention(grid.to_grid(q_bhrd), k, v, self._backend, scale, grid.documents))


class PartAttention:
    """Attention of a part's masks to stream 0 and to the earlier masks of their groups, which may come one by one."""

    def __init__(self, part: Part, keys_values: list[tuple[Tensor, Tensor]], backend: str) -> None:
        self._part, self._backend = part, backend
        self._real = keys_values
        self._streams: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._grid: Grid | None = None

    def begin_stream(self, grid: Grid) -> None:
        """Where the rows of the next stream lie in the part, or of all its streams."""
        self._grid = grid

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[1, R, H, Dh] for queries [1, H, R, Dh], keys and values [1, Hkv, R, Dh] of the rows at hand."""
        grid, part = self._grid, self._part
        if grid is None:
            raise ValueError("attending needs a stream: call begin_stream() first")
        k0, v0 = self._real[layer_index]
        here = slice(part.begin, part.end)
        streams = self._streams.setdefault(layer_index, [(k0[:, :, :, here], v0[:, :, :, here])])
        streams.append((grid.to_grid(k_bhrd), grid.to_grid(v_bhrd)))
        k, v = (torch.cat(parts, dim=2) for parts in zip(*streams, strict=True))
        past = None
        if part.past_queries:
            before = slice(part.past_begin, part.begin)
            past = Past(k0[:, :, 0, before], v0[:, :, 0, before], part.past_queries)
        out = group_attention(grid.to_grid(q_bhrd), k, v, self._backend, scale, part.documents, past)
        return grid.from_grid(out)


@dataclass(frozen=True)
class PartRows:
    """The masks of a part, stream after stream.

    Args:
        stream_n: [n] from 1 on.
        place_n: [n] in the part's C positions.
        token_n: [n] the place of each one's newest token among all tokens of the batch.
        real_n: [n] that token's row among those of stream 0.
        position_n: [n] position ids.
        counts_k: Rows of each of the K streams.
        size: C.
        attention: What they attend by.
    """

    stream_n: Tensor
    place_n: Tensor
    token_n: Tensor
    real_n: Tensor
    position_n: Tensor
    counts_k: list[int]
    size: int
    attention: PartAttention

    @property
    def grid(self) -> Grid:
        """Of all K streams."""
        shape = (1, len(self.counts_k), self.size)
        index_n = (self.stream_n - 1) * self.size + self.place_n
        return Grid(shape, index_n, in_order=len(index_n) == shape[1] * shape[2])
