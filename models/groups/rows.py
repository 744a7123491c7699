"""Which tokens, features and labels belong to a group, and which rows of the groups are computed in training.

Group t is "x_t is the newest committed token". It predicts x_{t+1} (depth 1) to x_{t+G} (depth G). Available then: the
embedding of x_t and the target's feature h_{t-1}, the one that *predicted* x_t; h_t does not exist yet, because the
target has not processed x_t.

Group attention is defined on a full grid of B sequences, G rows of a group (one for each depth) and S positions, but
most of the grid is not needed: padding, real tokens after the last label, masks whose label is outside an assistant
turn, and masks that are dropped on purpose (P-EAGLE's conditional drop, arXiv 2602.01469). Norms, projections and the
MLP therefore run on the *active* rows, packed as one sequence [1, N, D]; only the attention core unpacks them onto the
grid, where an inactive row costs its attention and nothing else. Real keys that an active row may see are always
active, and so are the earlier masks of its group.

Where several documents are packed into a row of the batch, or where it is asked for, the rows of the batch follow each
other on the grid of the attention core, as one sequence of documents, without what follows the last active row of
each: nothing is seen across a border, and attention costs the sum of the documents' squares, whatever the padding.

How many rows there are has to be known before anything can be computed with them: all such numbers are asked of the
device in one copy, the only time that it is waited for.

Shapes: B batch, G depths, S positions, N active rows, M of them labelled, P = B*S tokens, D documents, T tokens of all
documents, H heads, Dh head size, F features.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100


def document_starts(position_ids_bs: Tensor) -> Tensor:
    """[B, S] bool: the first token of each document of packed rows, where position ids do not go on counting.

    The same rule by which transformers keeps packed documents apart in the target's attention.
    """
    first_b1 = torch.ones_like(position_ids_bs[:, :1], dtype=torch.bool)
    return torch.cat([first_b1, position_ids_bs.diff(dim=1) != 1], dim=1)


def previous_features(features_bsf: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """[B, S, F]: h_{t-1} at t, the feature that predicted x_t; zeros for a document's first token."""
    # Not by torch.cat: autocast in bf16 refuses it the features of a target in fp16.
    previous_bsf = F.pad(features_bsf[:, :-1], (0, 0, 1, 0))
    if position_ids is None:
        return previous_bsf
    starts_bs = document_starts(position_ids.expand(features_bsf.shape[:2]))
    return previous_bsf.masked_fill(starts_bs.unsqueeze(-1), 0.0)


def depth_labels(input_ids_bs: Tensor, loss_mask_bs: Tensor, num_depths: int) -> Tensor:
    """[B, G, S]: label of depth j+1 at t is x_{t+1+j} if loss_mask[t+1..t+1+j] are all 1, else -100.

    A run of ones in the mask is one assistant turn, so no label crosses the end of a turn.
    """
    batch, length = input_ids_bs.shape
    labels = input_ids_bs.new_full((batch, num_depths, length), IGNORED_LABEL)
    valid = torch.ones_like(input_ids_bs, dtype=torch.bool)
    for j in range(min(num_depths, length - 1)):
        shift = j + 1
        valid = valid[:, : length - shift] & loss_mask_bs[:, shift:].bool()
        labels[:, j, : length - shift] = torch.where(valid, input_ids_bs[:, shift:], IGNORED_LABEL)
    return labels


@dataclass(frozen=True, eq=False)
class Documents:
    """Where documents begin and end; some may have no token at all.

    Args:
        bounds_d: [D+1] int32, where each begins, and T.
        max_length_tokens: Of the longest.
    """

    bounds_d: Tensor
    max_length_tokens: int

    @cached_property
    def lengths(self) -> list[int]:
        """[D] tokens of each. Waits for the device."""
        return self.bounds_d.diff().tolist()

    def numbers(self, num_tokens: int) -> Tensor:
        """[T] the document of each token."""
        token_t = torch.arange(num_tokens, device=self.bounds_d.device, dtype=self.bounds_d.dtype)
        return torch.searchsorted(self.bounds_d[1:], token_t, right=True)


@dataclass(frozen=True)
class Grid:
    """Places of rows in the tensors of the attention core.

    Args:
        shape: Batch, G and positions; of packed documents one sequence of all of them.
        index_n: [N] into the flattened grid.
        in_order: Whether there is a row for each place of the grid, in its order.
        documents: Of packed rows, in the grid's positions.
    """

    shape: tuple[int, int, int]
    index_n: Tensor
    in_order: bool = False
    documents: Documents | None = None

    def to_grid(self, packed: Tensor) -> Tensor:
        """[1, H, N, Dh] to [B, H, G, S, Dh], zeros where a row is inactive."""
        batch, num_depths, length = self.shape
        rows = packed[0].transpose(0, 1)
        if not self.in_order:
            rows = rows.new_zeros(batch * num_depths * length, *rows.shape[1:]).index_copy(0, self.index_n, rows)
        return rows.unflatten(0, self.shape).permute(0, 3, 1, 2, 4)

    def from_grid(self, grid: Tensor) -> Tensor:
        """[B, H, G, S, Dh] to [1, N, H, Dh]."""
        rows = grid.permute(0, 2, 3, 1, 4).flatten(0, 2)
        return (rows if self.in_order else rows.index_select(0, self.index_n)).unsqueeze(0)

    def of_depths(self, place_n: Tensor, first: int, count: int) -> Grid:
        """Return a grid of `count` depths from `first` on, for these rows, which are all that they have."""
        batch, num_depths, length = self.shape
        index_n = self.index_n[place_n]
        of_batch_n = index_n // (num_depths * length)
        index_n = index_n - (of_batch_n * (num_depths - count) + first) * length
        return Grid((batch, count, length), index_n, documents=self.documents)


@dataclass(frozen=True)
class ActiveRows:
    """The rows of a [B, G, S] grid that are computed, in its order.

    Args:
        shape: B, G, S.
        index_n: [N] into the flattened grid.
        counts_g: [G] rows of each depth.
        labelled_m: [M] places of those that carry a label among the N.
        grid: Their places for the attention core.
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
    ) -> ActiveRows:
        """Return every row, none of them labelled."""
        labels_bgs = torch.full(shape, IGNORED_LABEL, device=device)
        return ActiveRows.of(labels_bgs, torch.ones_like(labels_bgs, dtype=torch.bool), position_ids, first_token)

    @staticmethod
    def of(
        labels_bgs: Tensor,
        active_bgs: Tensor | None = None,
        position_ids: Tensor | None = None,
        first_token: bool = True,
        in_documents: bool = False,
        whole_groups: bool = False,
    ) -> ActiveRows:
        """Return the active rows of these labels; one at least.

        Args:
            labels_bgs: [B, G, S], -100 where there is none. A label at depth j implies those at depths below.
            active_bgs: [B, G, S] bool, by default `active(labels_bgs)`. It is changed where first tokens have no row.
            position_ids: [B, S] of packed sequences, which count up and start anew at each document.
            first_token: Whether documents have a row for their first token.
            in_documents: Lay the sequences of a batch out one after the other too, each as a document at least.
            whole_groups: A group has rows at all depths but the first, or none; where no group has, one is made.
        """
        active_bgs = active(labels_bgs) if active_bgs is None else active_bgs
        batch, num_depths, length = active_bgs.shape
        starts_bs = None
        if position_ids is not None:
            starts_bs = document_starts(position_ids.expand(batch, length))
        elif in_documents:
            starts_bs = torch.zeros_like(active_bgs[:, 0])
            starts_bs[:, 0].fill_(True)
        if not first_token:
            active_bgs[:, :, :1].fill_(False)
            if starts_bs is not None:
                active_bgs &= ~starts_bs.unsqueeze(1)
        labelled_bgs = active_bgs & (labels_bgs != IGNORED_LABEL)
        asked = [active_bgs.sum((0, 2)), labelled_bgs.sum().view(1)]
        placed_bs = None
        if starts_bs is not None:
            # Tokens with a place on a packed grid, among them that of the row that is made where no other is.
            placed_bs = active_bgs.any(1).flip(-1).cumsum(-1).flip(-1) > 0
            if not first_token:
                placed_bs &= ~starts_bs
            placed_bs[0, int(not first_token)].fill_(True)
            asked += [starts_bs.sum().view(1), placed_bs.sum().view(1), _longest(starts_bs, placed_bs).view(1)]
        counts = torch.cat(asked).tolist()
        counts_g, num_labelled = counts[:num_depths], counts[num_depths]
        index_n = active_bgs.flatten().nonzero_static(size=sum(counts_g)).squeeze(1)
        if sum(counts_g[int(whole_groups) :]) == 0:  # transformers' layers do not run on no row at all
            made = num_depths if whole_groups else 1
            index_n = torch.arange(made, device=index_n.device) * length + int(not first_token)
            counts_g = [1] * made + counts_g[made:]
        labelled_m = labelled_bgs.flatten()[index_n].nonzero_static(size=num_labelled).squeeze(1)
        shape = (batch, num_depths, length)
        if starts_bs is not None and placed_bs is not None and (in_documents or counts[num_depths + 1] > batch):
            grid = _packed_grid(shape, index_n, starts_bs, placed_bs, *counts[num_depths + 1 :])
        else:
            grid = _plain_grid(shape, index_n, first_token)
        return ActiveRows(shape, index_n, counts_g, labelled_m, grid)

    @cached_property
    def batch_n(self) -> Tensor:
        return self.index_n // (self.shape[1] * self.shape[2])

    @cached_property
    def depth_n(self) -> Tensor:
        """[N] the row of its group that each is: 0 for the newest token, j for [MASK]_j."""
        return self.index_n // self.shape[2] % self.shape[1]

    @cached_property
    def position_n(self) -> Tensor:
        return self.index_n % self.shape[2]

    @cached_property
    def token_n(self) -> Tensor:
        """[N] the place of each row's newest token in [P]."""
        return self.batch_n * self.shape[2] + self.position_n

    def by_depth(self) -> list[tuple[Tensor, Grid]]:
        """Return for each depth that has rows their places among the N, and a grid of that depth alone."""
        places = self.depth_n.argsort(stable=True).split(self.counts_g)
        return [(place_n, self.grid.of_depths(place_n, j, 1)) for j, place_n in enumerate(places) if len(place_n)]

    def first_and_others(self) -> tuple[tuple[Tensor, Grid], tuple[Tensor, Grid]]:
        """Return the same as `by_depth` for the first depth and for all others together. There must be rows of both."""
        first = self.counts_g[0]
        place_n = self.depth_n.argsort(stable=True)
        others = self.grid.of_depths(place_n[first:], 1, self.shape[1] - 1)
        return (place_n[:first], self.grid.of_depths(place_n[:first], 0, 1)), (place_n[first:], others)

    def document_lengths(self, position_ids: Tensor | None = None) -> Tensor:
        """[B, S] how many tokens the document of each token has, up to its last label; 0 where it has none."""
        batch, _, length = self.shape
        if position_ids is None:
            position_ids = torch.arange(length, device=self.token_n.device)
        place_bs = position_ids.expand(batch, length)
        document_p = document_starts(place_bs).flatten().cumsum(0) - 1
        # The newest token of the last group with a label is followed by it, at depth 1.
        token_m = self.token_n[self.labelled_m]
        ends_m = place_bs.flatten()[token_m] + 2
        lengths_d = torch.zeros_like(document_p).scatter_reduce(0, document_p[token_m], ends_m, "amax")
        return lengths_d[document_p].view(batch, length)

    @cached_property
    def labelled_tokens(self) -> list[Tensor]:
        """For each depth the places [M] of its labelled rows' newest tokens in [P]. All rows of masks are labelled."""
        masks = self.counts_g[1:]
        order_m = self.depth_n[self.labelled_m].argsort(stable=True)
        return list(self.token_n[self.labelled_m[order_m]].split([len(order_m) - sum(masks), *masks]))


def active(labels_bgs: Tensor, shares_g: list[float] | None = None, generator: torch.Generator | None = None) -> Tensor:
    """[B, G, S] bool: the masks that carry a label, and the real tokens up to the last group that has one.

    Args:
        labels_bgs: [B, G, S], -100 where there is none. A label at depth j implies those at depths below.
        shares_g: Of the masks that would be active, the share of each depth that is kept, at random and only where the
            mask before it is: conditional drop of deep positions. By default all are.
        generator: On the labels' device; torch's own by default.
    """
    active_bgs = labels_bgs != IGNORED_LABEL
    if shares_g is not None:
        drawn = torch.rand(active_bgs[:, 1:].shape, generator=generator, device=active_bgs.device)
        kept = torch.ones_like(active_bgs[:, 0])
        for j, (share, deeper) in enumerate(itertools.pairwise(shares_g)):
            kept = kept & (drawn[:, j] < deeper / share)
            active_bgs[:, j + 1] &= kept
    active_bgs[:, 0] = active_bgs[:, 0].flip(-1).cumsum(-1).flip(-1) > 0
    return active_bgs


def _plain_grid(shape: tuple[int, int, int], index_n: Tensor, first_token: bool) -> Grid:
    """Rows of the batch as they are, without the places of first tokens if these have none."""
    batch, num_depths, length = shape
    if not first_token:
        index_n = index_n // length * (length - 1) + index_n % length - 1
        shape = (batch, num_depths, length - 1)
    return Grid(shape, index_n, in_order=len(index_n) == batch * num_depths * shape[2])


def _packed_grid(
    shape: tuple[int, int, int],
    index_n: Tensor,
    starts_bs: Tensor,
    placed_bs: Tensor,
    num_documents: int,
    total: int,
    longest: int,
) -> Grid:
    """All documents of the batch one after the other, each of its tokens that are placed."""
    batch, num_depths, length = shape
    placed_p = placed_bs.flatten().long()
    before_p = placed_p.cumsum(0) - placed_p
    begin_d = before_p[starts_bs.flatten().nonzero_static(size=num_documents).squeeze(1)]
    bounds_d = torch.cat([begin_d, begin_d.new_full((1,), total)]).int()
    token_n = index_n // (num_depths * length) * length + index_n % length
    index_n = index_n // length % num_depths * total + before_p[token_n]
    in_order = 1 in (batch, num_depths) and len(index_n) == num_depths * total
    return Grid((1, num_depths, total), index_n, in_order, Documents(bounds_d, longest))


def _longest(starts_bs: Tensor, placed_bs: Tensor) -> Tensor:
    """[] placed tokens of the longest document."""
    placed_p = placed_bs.flatten().long()
    through_p = placed_p.cumsum(0)
    before_p = (through_p - placed_p).where(starts_bs.flatten(), 0).cummax(0).values
    return (through_p - before_p).max()
