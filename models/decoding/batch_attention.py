"""Attention over the caches of several rows, each with its own length: `CachedAttention` for a batch.

Shapes: B rows, A of them in a step, H heads, Hkv key-value heads, R new tokens of each, S columns, Dh head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.models.groups.layers import cache_shape


class BatchAttention:
    """Keys and values of B sequences for all layers; the caller moves `lengths` on.

    A step writes R new tokens behind each row's own `lengths`, in causal order.
    """

    def __init__(
        self, config: PreTrainedConfig, batch_size: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._keys_values = torch.zeros(cache_shape(config, batch_size, capacity), device=device, dtype=dtype)
        self._repeats = config.num_attention_heads // self._keys_values.shape[3]
        self.lengths = [0] * batch_size
        self._columns = torch.arange(capacity, device=device)

    def begin_step(self, rows: list[int], num_new: int) -> Tensor:
        """Prepare a step of R tokens in each of A different, ascending rows; their places [A, R] in their sequences."""
        lengths = [self.lengths[row] for row in rows]
        starts = torch.tensor(lengths, device=self._columns.device)
        self._places = starts[:, None] + self._columns[:num_new]
        self._row_ids = torch.tensor(rows, device=starts.device)
        # Neighbours are read where they lie; others are copied together.
        together = rows[-1] - rows[0] + 1 == len(rows)
        self._read: slice | Tensor = slice(rows[0], rows[-1] + 1) if together else self._row_ids
        self._end = max(lengths) + num_new
        hidden = self._columns[: self._end] > self._places[..., None]
        mask = self._keys_values.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        # The query heads that share a key head stand one after the other as its rows.
        self._mask = mask[:, None].repeat(1, 1, self._repeats, 1)
        return self._places

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[A, R, H, Dh] for queries [A, H, R, Dh]; stores the new keys and values [A, Hkv, R, Dh]."""
        keys_values = self._keys_values[layer_index]
        for room, new in zip(keys_values, (k_bhrd, v_bhrd), strict=True):
            room[self._row_ids[:, None], :, self._places] = new.transpose(1, 2)
        keys, values = keys_values[:, self._read, :, : self._end]
        q_grouped = q_bhrd.unflatten(1, (-1, self._repeats)).flatten(2, 3)
        out = F.scaled_dot_product_attention(q_grouped, keys, values, self._mask, scale=scale)
        return out.unflatten(2, (self._repeats, -1)).flatten(1, 2).transpose(1, 2)
