"""Which rows of the streams are computed in training.

Group attention is defined on a full grid of B sequences, G streams and S positions, but most of the grid is idle:
padding, real tokens behind the last label, masks whose label lies outside an assistant turn, and masks that are dropped
on purpose (P-EAGLE's conditional drop, arXiv 2602.01469). Norms, projections and the MLP therefore run on the rows that
matter, packed as one sequence [1, N, D]; only the attention core unpacks them onto the grid, where an absent row costs
its attention and nothing else. Real keys that a present row may see are always present, and so are the earlier masks of
its group.

Where several documents are packed into a row of the batch, each has a grid of its own for the attention core: nothing
is seen across a border, by construction, and attention costs the sum of the documents' squares.

Shapes: B batch, G streams, S positions, N present rows, H heads, Dh head size; of a document M rows and L positions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.models.groups.alignment import IGNORED_LABEL, document_starts


@dataclass(frozen=True)
class GroupRows:
    """The present rows of a [B, G, S] grid, in its order.

    Args:
        shape: B, G, S.
        index_n: [N] into the flattened grid.
        documents: Of packed rows: for each document its places [M] among the N rows, and these on its own grid
            [1, G, L].
    """

    shape: tuple[int, int, int]
    index_n: Tensor
    documents: tuple[tuple[Tensor, GroupRows], ...] = ()

    @staticmethod
    def full(batch: int, num_streams: int, length: int, device: torch.device) -> GroupRows:
        """Every row."""
        total = batch * num_streams * length
        return GroupRows((batch, num_streams, length), torch.arange(total, device=device))

    @staticmethod
    def that_matter(
        labels_bgs: Tensor,
        keep_ratio: float = 1.0,
        keep_ratio_min: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> GroupRows:
        """The masks that carry a label, and the real tokens up to the last group that does.

        Args:
            labels_bgs: [B, G, S], -100 where there is none. A label at depth j implies those at depths below.
            keep_ratio: Of the masks that would be there, [MASK]_j is kept with probability keep_ratio**j, and only
                where [MASK]_{j-1} is: conditional drop of deep positions.
            keep_ratio_min: The least of these probabilities.
            generator: On the labels' device; torch's own by default.
        """
        present = labels_bgs != IGNORED_LABEL
        if keep_ratio < 1.0:
            shares_g = kept_shares(present.shape[1], keep_ratio, keep_ratio_min)
            conditional_k = [deeper / share for share, deeper in itertools.pairwise(shares_g)]
            kept = torch.rand(present[:, 1:].shape, generator=generator, device=present.device)
            kept = kept < torch.tensor(conditional_k, device=present.device)[:, None]
            present[:, 1:] &= kept.cumprod(dim=1).bool()
        # Real tokens: all up to the last label of their sequence.
        present[:, 0] = present[:, 0].flip(-1).cumsum(-1).flip(-1) > 0
        present[0, 0, 0] = True  # transformers' layers do not run on no row at all
        batch, num_streams, length = labels_bgs.shape
        return GroupRows((batch, num_streams, length), present.flatten().nonzero().squeeze(1))

    def without_starts(self, position_ids: Tensor) -> GroupRows:
        """Those that do not stand at a document's first token; one at least."""
        batch, _, length = self.shape
        kept_n = ~document_starts(position_ids.expand(batch, length))[self.batch_n, self.position_n]
        index_n = self.index_n[kept_n]
        return replace(self, index_n=index_n if len(index_n) else torch.ones_like(self.index_n[:1]))

    def in_documents(self, position_ids: Tensor, first_token: bool = True) -> GroupRows:
        """The same rows of packed sequences, in which position ids [B, S] count up and start anew at each document.

        Args:
            first_token: Whether documents have a row for their first token; else none of these rows may be there.
        """
        batch, num_streams, length = self.shape
        starts_bs, skipped = document_starts(position_ids.expand(batch, length)), int(not first_token)
        if int(starts_bs.sum()) == batch:
            if first_token:
                return self
            index_n = (self.batch_n * num_streams + self.stream_n) * (length - 1) + self.position_n - 1
            every_row = torch.arange(len(index_n), device=index_n.device)
            return replace(self, documents=((every_row, GroupRows((batch, num_streams, length - 1), index_n)),))
        place_of_start_d = starts_bs.flatten().nonzero().squeeze(1)
        lengths = place_of_start_d.diff(append=place_of_start_d.new_tensor([batch * length])).tolist()
        place_n = self.batch_n * length + self.position_n
        document_n = starts_bs.flatten().cumsum(0)[place_n] - 1
        offset_n = place_n - place_of_start_d[document_n]
        counts = torch.bincount(document_n, minlength=len(lengths)).tolist()
        documents = []
        for rows_m, length_tokens in zip(document_n.sort(stable=True).indices.split(counts), lengths, strict=True):
            length_there = length_tokens - skipped
            if length_there == 0:  # nothing is left of it
                continue
            index_m = self.stream_n[rows_m] * length_there + offset_n[rows_m] - skipped
            documents.append((rows_m, GroupRows((1, num_streams, length_there), index_m)))
        return replace(self, documents=tuple(documents))

    @property
    def batch_n(self) -> Tensor:
        return self.index_n // (self.shape[1] * self.shape[2])

    @property
    def stream_n(self) -> Tensor:
        return self.index_n // self.shape[2] % self.shape[1]

    @property
    def position_n(self) -> Tensor:
        return self.index_n % self.shape[2]

    def to_grids(self, packed: Tensor) -> list[Tensor]:
        """`to_grid`, of each document."""
        if not self.documents:
            return [self.to_grid(packed)]
        return [document.to_grid(packed[:, :, rows_m]) for rows_m, document in self.documents]

    def from_grids(self, grids: list[Tensor]) -> Tensor:
        """`from_grid`, of all documents together."""
        if not self.documents:
            return self.from_grid(grids[0])
        parts = [document.from_grid(grid) for (_, document), grid in zip(self.documents, grids, strict=True)]
        return torch.cat(parts, dim=1)[:, torch.cat([rows_m for rows_m, _ in self.documents]).argsort()]

    def to_grid(self, packed: Tensor) -> Tensor:
        """[1, H, N, Dh] to [B, H, G, S, Dh], zeros where a row is absent."""
        batch, num_streams, length = self.shape
        rows = packed[0].transpose(0, 1)
        if len(self.index_n) < batch * num_streams * length:
            rows = rows.new_zeros(batch * num_streams * length, *rows.shape[1:]).index_copy(0, self.index_n, rows)
        return rows.unflatten(0, self.shape).permute(0, 3, 1, 2, 4)

    def from_grid(self, grid: Tensor) -> Tensor:
        """[B, H, G, S, Dh] to [1, N, H, Dh]."""
        rows = grid.permute(0, 2, 3, 1, 4).flatten(0, 2)
        return (rows if len(rows) == len(self.index_n) else rows[self.index_n]).unsqueeze(0)


def kept_shares(num_streams: int, keep_ratio: float, keep_ratio_min: float) -> list[float]:
    """Of each stream, the share of its rows that is kept; all of the real tokens'."""
    return [max(keep_ratio**j, keep_ratio_min) for j in range(num_streams)]
