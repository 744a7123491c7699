"""Which tokens, features and labels belong to a group, which rows of the groups are computed, and who attends to whom.

Group t is "x_t is the newest committed token". It predicts x_{t+1} (depth 1) to x_{t+G} (depth G). Available then: the
embedding of x_t and the target's feature h_{t-1}, the one that *predicted* x_t; h_t does not exist yet, because the
target has not processed x_t.

Rows are defined on a full grid of B sequences, R rows of a group (one for each depth; DFlash's blocks begin with one
or two that predict nothing) and S positions, but most of the grid is not needed: padding, real tokens after the last
label, masks whose label is outside an assistant turn, and masks that are dropped on purpose (P-EAGLE's conditional
drop, arXiv 2602.01469). Norms, projections and the MLP therefore run on the *active* rows, packed as one sequence
[1, N, D]; only the attention core unpacks them onto a grid, where an inactive row costs its attention and nothing
else. Real keys that an active row may see are always active, and so are the earlier masks of its group.

Where several documents are packed into a sequence, or `in_documents`, the sequences follow each other on the grid of
the attention core, as one sequence of documents, without the tokens after the last active row of each sequence: nothing
is seen across a border, and attention costs the sum of the documents' squares, whatever the padding. Tokens after the
last label of an earlier document keep their row, 0.24% of all rows of the quickstart's answers.

The number of rows has to be known before anything can be computed with them: all such numbers are read from the device
in one copy for each micro-batch.

Shapes: B batch, G depths, R rows of a group, S positions, N active rows, M of them labelled, P = B*S tokens, D
documents, F features.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100
Shape = tuple[int, int, int]
# Packed documents: where each begins, and the end of the last, [D+1] int32; tokens of the longest. Some may be empty.
Documents = tuple[Tensor, int]
# Rows of some depths alone: their places among the N, and a grid of these depths with the rows' places on it.
DepthRows = tuple[Tensor, Shape, Tensor]
Core = tuple[Shape, Tensor, bool, Documents | None]  # fields of `Groups`, from `core_shape` on


def group_mask(
    query: Tensor,
    key: Tensor,
    length: int,
    causal: bool = True,
    window: int | None = None,
    document_s: Tensor | None = None,
) -> Tensor:
    """Return a bool mask, True where a query may attend to a key.

    For two groups with two masks each (1: the row's query sees the key; dot: it does not):

        key      x0  x1   m1 of x0, x1   m2 of x0, x1
        x0        1   .        .   .          .   .      every row: the real tokens up to its own group's
        x1        1   1        .   .          .   .
        m1 of x0  1   .        1   .          c   .      masks: those of their group, up to themselves;
        m1 of x1  1   1        .   1          .   c      c: later ones too, where groups are not causal
        m2 of x0  1   .        1   .          1   .
        m2 of x1  1   1        .   1          .   1

    Args:
        query: Places on a grid [G, S], flattened: depth * S + position. Broadcasts with `key`.
        key: Places of the keys, numbered in the same way.
        length: S.
        causal: Whether a mask sees no later mask of its group.
        window: Number of tokens that a query sees, up to and including its own position; None: all. A mask of depth j
            stands j after its group's token.
        document_s: [S] number of the document at each position; a query sees no other document.
    """
    query_depth, query_position = query // length, query % length
    key_depth, key_position = key // length, key % length
    real_past = (key_depth == 0) & (key_position <= query_position)
    if window is not None:
        real_past &= key_position > query_position + query_depth - window
    is_seen = (key_depth <= query_depth) if causal else (query_depth >= 1)
    mask = real_past | ((key_depth >= 1) & is_seen & (key_position == query_position))
    return mask if document_s is None else mask & (document_s[query_position] == document_s[key_position])


def number_documents(documents: Documents, length: int) -> Tensor:
    """Return for each of S positions the number of its document, [S]."""
    bounds_d, _ = documents
    position_s = torch.arange(length, device=bounds_d.device, dtype=bounds_d.dtype)
    return torch.searchsorted(bounds_d[1:], position_s, right=True)


def document_starts(position_ids_bs: Tensor) -> Tensor:
    """Return [B, S] bool, the first token of each document of packed rows, where position ids start again.

    The same rule by which transformers keeps packed documents apart in the target's attention.
    """
    first_b1 = torch.ones_like(position_ids_bs[:, :1], dtype=torch.bool)
    return torch.cat([first_b1, position_ids_bs.diff(dim=1) != 1], dim=1)


def previous_features(features_bsf: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Shift features [B, S, F] by a token: at t h_{t-1}, which predicted x_t; zeros for a document's first token."""
    # Not torch.cat, which autocast to bf16 rejects for features in fp16.
    previous_bsf = F.pad(features_bsf[:, :-1], (0, 0, 1, 0))
    if position_ids is None:
        return previous_bsf
    starts_bs = document_starts(position_ids.expand(features_bsf.shape[:2]))
    return previous_bsf.masked_fill(starts_bs.unsqueeze(-1), 0.0)


def depth_labels(input_ids_bs: Tensor, loss_mask_bs: Tensor, num_depths: int) -> Tensor:
    """Return labels [B, G, S]: of depth j+1 at t, x_{t+1+j} if loss_mask[t+1..t+1+j] are all 1, else -100.

    A run of ones is an answer: no label crosses a token without loss, so the G-1 groups before such a token lack deep
    labels.
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
class Groups:
    """The groups of a batch: tokens, labels, and the N query rows to compute, in the order of a grid [B, R, S]."""

    input_ids: Tensor  # [B, S]
    labels_bgs: Tensor  # of the last G rows of a group, -100 without a label
    position_ids: Tensor | None  # [B, S], if they are not 0..S-1
    shape: Shape  # B, R, S
    index_n: Tensor  # places of the rows on the flattened grid
    counts_r: list[int]  # rows of each depth
    labelled_m: Tensor  # indices of the rows with a label among the N rows
    core_shape: Shape  # grid of the attention kernel: batch, R and positions; documents are joined to one sequence
    core_index_n: Tensor  # indices of the rows on that grid, flattened
    is_full: bool  # whether the rows fill the kernel's grid completely, in its order
    documents: Documents | None = None  # documents that the core's positions consist of, if there are several

    @staticmethod
    def of(
        input_ids: Tensor,
        labels_bgs: Tensor,
        active_brs: Tensor,
        position_ids: Tensor | None = None,
        first_token: bool = True,
        in_documents: bool = False,
    ) -> Groups:
        """Return the groups of these tokens and labels, with one row at least.

        Args:
            input_ids: [B, S].
            labels_bgs: [B, G, S], -100 without a label. A label at depth j implies labels at all smaller depths.
            active_brs: [B, R, S] bool, the rows to compute. If R > G, a group has rows at all depths but the first, or
                none; if no group has any, one is added.
            position_ids: [B, S], which start again at each document of packed sequences.
            first_token: Whether documents have a row for their first token; sequences of one token always have it.
            in_documents: Join the sequences of a batch to one for attention, as documents that do not see each other.
        """
        batch, num_rows, length = active_brs.shape
        shape = (batch, num_rows, length)
        first_token = first_token or length == 1
        first_depth = num_rows - labels_bgs.shape[1]
        starts_bs = None
        if position_ids is not None:
            starts_bs = document_starts(position_ids.expand(batch, length))
        elif in_documents:
            starts_bs = torch.zeros_like(active_brs[:, 0])
            starts_bs[:, 0].fill_(True)
        if not first_token:
            has_row_b1s = torch.ones_like(active_brs[:, :1]) if starts_bs is None else ~starts_bs.unsqueeze(1)
            has_row_b1s[:, :, :1].fill_(False)
            active_brs, labels_bgs = active_brs & has_row_b1s, labels_bgs.where(has_row_b1s, IGNORED_LABEL)
        has_label_brs = F.pad(labels_bgs != IGNORED_LABEL, (0, 0, first_depth, 0)) & active_brs
        numbers = [active_brs.sum((0, 2)), has_label_brs.sum().view(1)]
        placed_bs = None
        if starts_bs is not None:
            # Tokens with a place on a packed grid, among them that of the row that is made where no other is.
            placed_bs = active_brs.any(1).flip(-1).cumsum(-1).flip(-1) > 0
            if not first_token:
                placed_bs &= ~starts_bs
            placed_bs[0, int(not first_token)] |= ~placed_bs.any()
            numbers += [starts_bs.sum().view(1), placed_bs.sum().view(1), _longest(starts_bs, placed_bs).view(1)]
        counts = torch.cat(numbers).tolist()
        counts_r, num_labelled, sizes = counts[:num_rows], counts[num_rows], counts[num_rows + 1 :]
        index_n = active_brs.flatten().nonzero_static(size=sum(counts_r)).squeeze(1)
        if sum(counts_r[min(first_depth, 1) :]) == 0:  # transformers' layers cannot run on zero rows
            made = num_rows if first_depth else 1
            index_n = torch.arange(made, device=index_n.device) * length + int(not first_token)
            counts_r = [1] * made + counts_r[made:]
        labelled_m = has_label_brs.flatten()[index_n].nonzero_static(size=num_labelled).squeeze(1)
        if starts_bs is not None and placed_bs is not None and (in_documents or sizes[0] > batch):
            core: Core = _packed_core(shape, index_n, starts_bs, placed_bs, *sizes)
        else:
            core = _plain_core(shape, index_n, first_token)
        return Groups(input_ids, labels_bgs, position_ids, shape, index_n, counts_r, labelled_m, *core)

    @property
    def first_depth(self) -> int:
        """Return the number in its group (0..R-1) of the row that predicts depth 1."""
        return self.shape[1] - self.labels_bgs.shape[1]

    @cached_property
    def row_n(self) -> Tensor:
        """Return each row's number in its group, 0..R-1, [N]. With masks 0 is the newest token and j [MASK]_j.

        In a block (DFlash) 0 is the context and 1 the newest token.
        """
        return self.index_n // self.shape[2] % self.shape[1]

    @cached_property
    def token_n(self) -> Tensor:
        """Return the index [N] of each row's newest token among the batch's P = B * S tokens."""
        return self.index_n // (self.shape[1] * self.shape[2]) * self.shape[2] + self.index_n % self.shape[2]

    @cached_property
    def position_n(self) -> Tensor:
        """Return the rows' position ids [N]: that of the group's newest token, plus the row's number.

        In a block (DFlash) they are one too high.
        """
        if self.position_ids is None:
            return self.token_n % self.shape[2] + self.row_n
        batch, _, length = self.shape
        return self.position_ids.expand(batch, length).flatten()[self.token_n] + self.row_n

    def labels(self, place_m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the depths and labels of M rows, given their indices [M] among all N rows.

        Returns:
            [M] each: depths from 0, labels, and the index among the P tokens of the token before each label, whose
            feature predicts it.
        """
        _, num_depths, length = self.labels_bgs.shape
        depth_m, token_m = self.row_n[place_m] - self.first_depth, self.token_n[place_m]
        index_m = (token_m // length * num_depths + depth_m) * length + token_m % length
        return depth_m, self.labels_bgs.flatten()[index_m], token_m + depth_m

    def on_grid(self, place_m: Tensor, rows_mx: Tensor, fill: float = 0.0) -> Tensor:
        """Scatter values [M, X] of rows (indices `place_m` among the N) to a grid [B, G, S, X]; `fill` elsewhere."""
        batch, num_depths, length = self.labels_bgs.shape
        slot_m = self.token_n[place_m] * num_depths + self.row_n[place_m] - self.first_depth
        grid = rows_mx.new_full((batch * length * num_depths, rows_mx.shape[-1]), fill)
        return grid.index_copy(0, slot_m, rows_mx).view(batch, length, num_depths, -1).transpose(1, 2)

    def rows_of_depths(self, *runs: int) -> list[DepthRows]:
        """Split the rows into runs of consecutive depths (1, 3: depth 0, then 1 to 3); drop runs without rows."""
        batch, num_rows, length = self.core_shape
        order_n, found, first = self.row_n.argsort(stable=True), list[DepthRows](), 0
        for count in runs:
            begin, end = sum(self.counts_r[:first]), sum(self.counts_r[: first + count])
            place_n = order_n[begin:end]
            index_n = self.core_index_n[place_n]
            sequence_n = index_n // (num_rows * length)
            index_n = index_n - (sequence_n * (num_rows - count) + first) * length
            found += [(place_n, (batch, count, length), index_n)] if end > begin else []
            first += count
        return found

    def document_lengths(self) -> Tensor:
        """Return for each token [B, S] the length of its document up to the last label; 0 for one without labels."""
        batch, _, length = self.shape
        position_ids = (
            torch.arange(length, device=self.token_n.device) if self.position_ids is None else self.position_ids
        )
        place_bs = position_ids.expand(batch, length)
        document_p = document_starts(place_bs).flatten().cumsum(0) - 1
        # The last group with a label has it at depth 1, so right after its newest token.
        token_m = self.token_n[self.labelled_m]
        ends_m = place_bs.flatten()[token_m] + 2
        lengths_d = torch.zeros_like(document_p).scatter_reduce(0, document_p[token_m], ends_m, "amax")
        return lengths_d[document_p].view(batch, length)

    @cached_property
    def labelled_by_depth(self) -> list[Tensor]:
        """Return for each depth the indices of its labelled rows among the N. Every mask's row must have a label.

        That is not so for DFlash, which computes whole groups.
        """
        masks = self.counts_r[1:]
        order_m = self.labelled_m[self.row_n[self.labelled_m].argsort(stable=True)]
        return list(order_m.split([len(order_m) - sum(masks), *masks]))


def active(labels_bgs: Tensor, shares_g: list[float] | None = None, generator: torch.Generator | None = None) -> Tensor:
    """Choose the rows to compute, [B, G, S] bool: masks with a label, and real tokens up to the last labelled group.

    Args:
        labels_bgs: [B, G, S], -100 without a label. A label at depth j implies labels at all smaller depths.
        shares_g: For each depth the share of its active masks to keep, at random and only where the
            mask before it is kept: P-EAGLE's conditional drop. By default all are kept.
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


def _plain_core(shape: Shape, index_n: Tensor, first_token: bool) -> Core:
    """Return the kernel's grid for unpacked sequences, without the places of tokens that have no row."""
    batch, num_rows, length = shape
    if not first_token:
        index_n = index_n // length * (length - 1) + index_n % length - 1
        shape = (batch, num_rows, length - 1)
    return shape, index_n, len(index_n) == batch * num_rows * shape[2], None


def _packed_core(
    shape: Shape, index_n: Tensor, starts_bs: Tensor, placed_bs: Tensor, num_documents: int, total: int, longest: int
) -> Core:
    """Return the kernel's grid for documents: joined to one sequence, without tokens that have no place."""
    batch, num_rows, length = shape
    placed_p = placed_bs.flatten().long()
    before_p = placed_p.cumsum(0) - placed_p
    begin_d = before_p[starts_bs.flatten().nonzero_static(size=num_documents).squeeze(1)]
    bounds_d = torch.cat([begin_d, begin_d.new_full((1,), total)]).int()
    token_n = index_n // (num_rows * length) * length + index_n % length
    index_n = index_n // length % num_rows * total + before_p[token_n]
    is_full = 1 in (batch, num_rows) and len(index_n) == num_rows * total
    return (1, num_rows, total), index_n, is_full, (bounds_d, longest)


def _longest(starts_bs: Tensor, placed_bs: Tensor) -> Tensor:
    """Return the placed tokens [] of the longest document."""
    placed_p = placed_bs.flatten().long()
    through_p = placed_p.cumsum(0)
    before_p = (through_p - placed_p).where(starts_bs.flatten(), 0).cummax(0).values
    return (through_p - before_p).max()
