"""Blocks of rows that attend to a context which no row of theirs made (DFlash, arXiv 2602.06036).

In ParallelSpec's groups stream 0 are real tokens, which go through the layers as all rows do. Here stream 0 is a
context: keys and values that each layer makes of the target's features, without a query and without a layer in between.
The streams behind it are the rows of a block, the newest token among them. The mask, for K = 2 masks a group:

    ParallelSpec, [x_t, m1, m2]             a block of DFlash, context c of features h, rows [x_t, m1, m2]
           x<=t  m1  m2                            h<t   x_t  m1  m2
    x_t     1     0   0                     x_t     1     1    1   1
    m1      1     1   0                     m1      1     1    1   1
    m2      1     1   1                     m2      1     1    1   1

At position t of the grid stream 0 holds h_{t-1}, the feature that predicted x_t, so that "features before t" is the
causal attention that stream 0 has anyway: group attention with queries of the last streams only.

Shapes: H heads, Hkv key/value heads, C context rows, N rows of blocks, Dh head size.
"""

import torch
from torch import Tensor

from draftsmith.models.groups.attention import group_attention
from draftsmith.models.groups.rows import Grid


class ContextAttention:
    """What blocks attend by in training; see `layers.RememberedAttention`.

    Args:
        context_grid, block_grid: Where context rows and rows of blocks lie; of one stream, and of all others.
        keys_values: Of each layer, [1, Hkv, C, Dh] twice, already rotated.
        backend: As in `group_attention`.
        causal: Whether a row sees none of its block behind it.
    """

    def __init__(
        self,
        context_grid: Grid,
        block_grid: Grid,
        keys_values: list[tuple[Tensor, Tensor]],
        backend: str,
        causal: bool,
    ) -> None:
        self._context_grid, self._block_grid = context_grid, block_grid
        self._keys_values, self._backend, self._causal = keys_values, backend, causal

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[1, N, H, Dh] for queries [1, H, N, Dh], keys and values [1, Hkv, N, Dh] of the rows of blocks."""
        grid = self._block_grid
        k, v = (
            torch.cat([self._context_grid.to_grid(context.to(own.dtype)), grid.to_grid(own)], dim=2)
            for context, own in zip(self._keys_values[layer_index], (k_bhrd, v_bhrd), strict=True)
        )
        q = grid.to_grid(q_bhrd)
        return grid.from_grid(group_attention(q, k, v, self._backend, scale, grid.documents, causal=self._causal))
