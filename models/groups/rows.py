"""Which rows of the streams are computed in training.

Group attention is defined on a full grid of B sequences, G streams and S positions, but most of the grid is idle:
padding, real tokens behind the last label, masks whose label lies outside an assistant turn, and masks that are dropped
on purpose (P-EAGLE's conditional drop, arXiv 2602.01469). Norms, projections and the MLP therefore run on the rows that
matter, packed as one sequence [1, N, D]; only the attention core unpacks them onto the grid, where an absent row costs
its attention and nothing else. Real keys that a present row may see are always present, and so are the earlier masks of
its group.

Where several documents are packed into a row of the batch, or where it is asked for, the rows of the batch lie one
behind the other on the grid of the attention core, as one sequence of documents, without what lies behind the last
present row of each: nothing is seen across a border, and attention costs the sum of the documents' squares, whatever
the padding.

How many rows there are has to be known before anything can be computed with them: all such numbers are asked of the
device in one copy, the only time that it is waited for.

Shapes: B batch, G streams, S positions, N present rows, M of them labelled, P = B*S tokens, D documents, H heads, Dh
head size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftsmith.models.groups.alignment import IGNORED_LABEL, document_starts
from draftsmith.models.groups.documents import Documents


@dataclass(frozen=True)
class Grid:
    """Where rows lie for the attention core.

    Args:
        shape: Its batch, G and positions; of packed documents one sequence of all of them.
        index_n: [N] into the flattened grid.
        in_order: Whether there is a row for each place of the grid, in its order.
        documents: Of packed rows, in the grid's positions.
        token_t: [positions] of packed rows: which token of the batch, [P], lies there.
    """

    shape: tuple[int, int, int]
    index_n: Tensor
    in_order: bool = False
    documents: Documents | None = None
    token_t: Tensor | None = None

    def to_grid(self, packed: Tensor) -> Tensor:
        """[1, H, N, Dh] to [B, H, G, S, Dh], zeros where a row is absent."""
        batch, num_streams, length = self.shape
        rows = packed[0].transpose(0, 1)
        if not self.in_order:
            rows = rows.new_zeros(batch * num_streams * length, *rows.shape[1:]).index_copy(0, self.index_n, rows)
        return rows.unflatten(0, self.shape).permute(0, 3, 1, 2, 4)

    def from_grid(self, grid: Tensor) -> Tensor:
        """[B, H, G, S, Dh] to [1, N, H, Dh]."""
        rows = grid.permute(0, 2, 3, 1, 4).flatten(0, 2)
        return (rows if self.in_order else rows.index_select(0, self.index_n)).unsqueeze(0)

    def of_streams(self, place_n: Tensor, first: int, count: int) -> Grid:
        """Of these rows, all of `count` streams from `first` on, on a grid of those streams alone."""
        batch, num_streams, length = self.shape
        index_n = self.index_n[place_n]
        of_batch_n = index_n // (num_streams * length)
        index_n = index_n - (of_batch_n * (num_streams - count) + first) * length
        return Grid((batch, count, length), index_n, documents=self.documents, token_t=self.token_t)


@dataclass(frozen=True)
class GroupRows:
    """The present rows of a [B, G, S] grid, in its order.

    Args:
        shape: B, G, S.
        index_n: [N] into the flattened grid.
        counts_g: [G] rows of each stream.
        labelled_m: [M] places of those that carry a label among the N.
        grid: Where they lie for the attention core.
    """

    shape: tuple[int, int, int]
    index_n: Tensor
    counts_g: list[int]
    labelled_m: Tensor
    grid: Grid

    @staticmethod
    def full(
        shape: tuple[int, int, int],
        device: torch.device,
        position_ids: Tensor | None = None,
        first_token: bool = True,
    ) -> GroupRows:
        """Every row, none of them labelled; for the others see `that_matter`."""
        labels_bgs = torch.full(shape, IGNORED_LABEL, device=device)
        return GroupRows.of(torch.ones_like(labels_bgs, dtype=torch.bool), labels_bgs, position_ids, first_token)

    @staticmethod
    def that_matter(
        labels_bgs: Tensor,
        keep_ratio: float = 1.0,
        keep_ratio_min: float = 0.0,
        generator: torch.Generator | None = None,
        position_ids: Tensor | None = None,
        first_token: bool = True,
    ) -> GroupRows:
        """The masks that carry a label, and the real tokens up to the last group that does; one row at least.

        Args:
            labels_bgs: [B, G, S], -100 where there is none. A label at depth j implies those at depths below.
            keep_ratio: Of the masks that would be there, [MASK]_j is kept with probability keep_ratio**j, and only
                where [MASK]_{j-1} is: conditional drop of deep positions.
            keep_ratio_min: The least of these probabilities.
            generator: On the labels' device; torch's own by default.
            position_ids: [B, S] of packed sequences, which count up and start anew at each document.
            first_token: Whether documents have a row for their first token.
        """
        present = GroupRows.present(labels_bgs, keep_ratio, keep_ratio_min, generator)
        return GroupRows.of(present, labels_bgs, position_ids, first_token)

    @staticmethod
    def present(
        labels_bgs: Tensor,
        keep_ratio: float = 1.0,
        keep_ratio_min: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """[B, G, S] bool: those of `that_matter`."""
        present = labels_bgs != IGNORED_LABEL
        if keep_ratio < 1.0:
            shares_g = kept_shares(present.shape[1], keep_ratio, keep_ratio_min)
            drawn = torch.rand(present[:, 1:].shape, generator=generator, device=present.device)
            kept = torch.ones_like(present[:, 0])
            for j, (share, deeper) in enumerate(itertools.pairwise(shares_g)):
                kept = kept & (drawn[:, j] < deeper / share)
                present[:, j + 1] &= kept
        # Real tokens: all up to the last label of their sequence.
        present[:, 0] = present[:, 0].flip(-1).cumsum(-1).flip(-1) > 0
        return present

    @staticmethod
    def of(
        present_bgs: Tensor,
        labels_bgs: Tensor,
        position_ids: Tensor | None,
        first_token: bool,
        in_documents: bool = False,
        whole_groups: bool = False,
    ) -> GroupRows:
        """Of `present` [B, G, S], from which the rows of first tokens are taken if these have none.

        in_documents: Let the sequences of a batch, too, lie one behind the other, each a document at least.
        whole_groups: A group has rows in all streams but the first, or none: where no group has, one is there.
        """
        batch, num_streams, length = present_bgs.shape
        starts_bs = None
        if position_ids is not None:
            starts_bs = document_starts(position_ids.expand(batch, length))
        elif in_documents:
            starts_bs = torch.zeros_like(present_bgs[:, 0])
            starts_bs[:, 0].fill_(True)
        if not first_token:
            present_bgs[:, :, :1].fill_(False)
            if starts_bs is not None:
                present_bgs &= ~starts_bs.unsqueeze(1)
        labelled_bgs = present_bgs & (labels_bgs != IGNORED_LABEL)
        asked = [present_bgs.sum((0, 2)), labelled_bgs.sum().view(1)]
        placed_bs = None
        if starts_bs is not None:
            placed_bs = _placed(present_bgs, starts_bs, first_token)
            asked += [starts_bs.sum().view(1), placed_bs.sum().view(1), _longest(starts_bs, placed_bs).view(1)]
        counts = torch.cat(asked).tolist()
        counts_g, num_labelled = counts[:num_streams], counts[num_streams]
        index_n = present_bgs.flatten().nonzero_static(size=sum(counts_g)).squeeze(1)
        if sum(counts_g[int(whole_groups) :]) == 0:  # transformers' layers do not run on no row at all
            there = num_streams if whole_groups else 1
            index_n = torch.arange(there, device=index_n.device) * length + int(not first_token)
            counts_g = [1] * there + counts_g[there:]
        labelled_m = labelled_bgs.flatten()[index_n].nonzero_static(size=num_labelled).squeeze(1)
        shape = (batch, num_streams, length)
        if starts_bs is not None and placed_bs is not None and (in_documents or counts[num_streams + 1] > batch):
            grid = _packed_grid(shape, index_n, starts_bs, placed_bs, *counts[num_streams + 1 :])
        else:
            grid = _plain_grid(shape, index_n, first_token)
        return GroupRows(shape, index_n, counts_g, labelled_m, grid)

    @cached_property
    def batch_n(self) -> Tensor:
        return self.index_n // (self.shape[1] * self.shape[2])

    @cached_property
    def stream_n(self) -> Tensor:
        return self.index_n // self.shape[2] % self.shape[1]

    @cached_property
    def position_n(self) -> Tensor:
        return self.index_n % self.shape[2]

    @cached_property
    def token_n(self) -> Tensor:
        """[N] the place of each row's newest token in [P]."""
        return self.batch_n * self.shape[2] + self.position_n

    def streams(self) -> list[tuple[Tensor, Grid]]:
        """Of each stream that has rows: their places among the N, and where they lie on a grid of its own."""
        places = self.stream_n.argsort(stable=True).split(self.counts_g)
        return [(place_n, self.grid.of_streams(place_n, j, 1)) for j, place_n in enumerate(places) if len(place_n)]

    def first_and_others(self) -> tuple[tuple[Tensor, Grid], tuple[Tensor, Grid]]:
        """Of stream 0, and of all others together: their places among the N, and where they lie on grids of their own.

        There must be rows of both.
        """
        first = self.counts_g[0]
        place_n = self.stream_n.argsort(stable=True)
        others = self.grid.of_streams(place_n[first:], 1, self.shape[1] - 1)
        return (place_n[:first], self.grid.of_streams(place_n[:first], 0, 1)), (place_n[first:], others)

    def labelled_streams(self) -> list[Tensor]:
        """Of each stream: the places of its labelled rows among the N. Of masks all are."""
        masks = self.counts_g[1:]
        order_m = self.stream_n[self.labelled_m].argsort(stable=True)
        return list(self.labelled_m[order_m].split([len(order_m) - sum(masks), *masks]))


def kept_shares(num_streams: int, keep_ratio: float, keep_ratio_min: float) -> list[float]:
    """Of each stream, the share of its rows that is kept; all of the real tokens'."""
    return [max(keep_ratio**j, keep_ratio_min) for j in range(num_streams)]


def _plain_grid(shape: tuple[int, int, int], index_n: Tensor, first_token: bool) -> Grid:
    """Rows of the batch as they are, without the places of first tokens if these have none."""
    batch, num_streams, length = shape
    if not first_token:
        index_n = index_n // length * (length - 1) + index_n % length - 1
        shape = (batch, num_streams, length - 1)
    return Grid(shape, index_n, in_order=len(index_n) == batch * num_streams * shape[2])


def _placed(present_bgs: Tensor, starts_bs: Tensor, first_token: bool) -> Tensor:
    """[B, S] bool: which tokens have a place on a packed grid."""
    placed_bs = present_bgs.any(1).flip(-1).cumsum(-1).flip(-1) > 0
    if not first_token:
        placed_bs &= ~starts_bs
    placed_bs[0, int(not first_token)].fill_(True)  # of the row that is there where no other is
    return placed_bs


def _packed_grid(
    shape: tuple[int, int, int],
    index_n: Tensor,
    starts_bs: Tensor,
    placed_bs: Tensor,
    num_documents: int,
    total: int,
    longest: int,
) -> Grid:
    """All documents of the batch one behind the other, each of its tokens that are placed."""
    batch, num_streams, length = shape
    placed_p = placed_bs.flatten().long()
    before_p = placed_p.cumsum(0) - placed_p
    begin_d = before_p[starts_bs.flatten().nonzero_static(size=num_documents).squeeze(1)]
    bounds_d = torch.cat([begin_d, begin_d.new_full((1,), total)]).int()
    token_n = index_n // (num_streams * length) * length + index_n % length
    index_n = index_n // length % num_streams * total + before_p[token_n]
    in_order = 1 in (batch, num_streams) and len(index_n) == num_streams * total
    token_t = placed_bs.flatten().nonzero_static(size=total).squeeze(1)
    return Grid((1, num_streams, total), index_n, in_order, Documents(bounds_d, longest), token_t)


def _longest(starts_bs: Tensor, placed_bs: Tensor) -> Tensor:
    """[] placed tokens of the longest document."""
    placed_p = placed_bs.flatten().long()
    through_p = placed_p.cumsum(0)
    before_p = (through_p - placed_p).where(starts_bs.flatten(), 0).cummax(0).values
    return (through_p - before_p).max()
