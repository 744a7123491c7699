"""Which rows of the streams are computed in training.

Group attention is defined on a full grid of B sequences, G streams and S positions, but most of the grid is idle:
padding, real tokens behind the last label, masks whose label lies outside an assistant turn, and masks that are dropped
on purpose (P-EAGLE's conditional drop, arXiv 2602.01469). Norms, projections and the MLP therefore run on the rows that
matter, packed as one sequence [1, N, D]; only the attention core unpacks them onto the grid, where an absent row costs
its attention and nothing else. Real keys that a present row may see are always present, and so are the earlier masks of
its group.

Shapes: B batch, G streams, S positions, N present rows, H heads, Dh head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.drafter import IGNORED_LABEL


@dataclass(frozen=True)
class GroupRows:
    """The present rows of a [B, G, S] grid, in its order.

    Args:
        shape: B, G, S.
        index_n: [N] into the flattened grid.
    """

    shape: tuple[int, int, int]
    index_n: Tensor

    @staticmethod
    def full(batch: int, num_streams: int, length: int, device: torch.device) -> GroupRows:
        """Every row."""
        total = batch * num_streams * length
        return GroupRows((batch, num_streams, length), torch.arange(total, device=device))

    @staticmethod
    def that_matter(labels_bgs: Tensor, keep_ratio: float = 1.0) -> GroupRows:
        """The masks that carry a label, and the real tokens up to the last group that does.

        Args:
            labels_bgs: [B, G, S], -100 where there is none. A label at depth j implies those at depths below.
            keep_ratio: Of the masks that would be there, [MASK]_j is kept with probability keep_ratio**j, and only
                where [MASK]_{j-1} is: conditional drop of deep positions. Uses torch's global generator.
        """
        present = labels_bgs != IGNORED_LABEL
        if keep_ratio < 1.0:
            kept = torch.rand(present[:, 1:].shape, device=present.device) < keep_ratio
            present[:, 1:] &= kept.cumprod(dim=1).bool()
        # Real tokens: all up to the last label of their sequence.
        present[:, 0] = present[:, 0].flip(-1).cumsum(-1).flip(-1) > 0
        present[0, 0, 0] = True  # transformers' layers do not run on no row at all
        batch, num_streams, length = labels_bgs.shape
        return GroupRows((batch, num_streams, length), present.flatten().nonzero().squeeze(1))

    @property
    def batch_n(self) -> Tensor:
        return self.index_n // (self.shape[1] * self.shape[2])

    @property
    def stream_n(self) -> Tensor:
        return self.index_n // self.shape[2] % self.shape[1]

    @property
    def position_n(self) -> Tensor:
        return self.index_n % self.shape[2]

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
