"""Attention of a drafter's layers over its KV cache, as it is and compiled.

Shapes: R rows of a forward, k of them kept, W tree nodes of one call, M nodes so far, E input width of a layer, D
hidden, V' columns of the logits, S capacity, L layers, Dh head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.models.decoding.kv_cache import KVCache, aligned, zero_mask
from draftsmith.models.kernels.cpu_kernels import can_attend
from draftsmith.models.kernels.cpu_layers import CpuLayers, head_size, num_kv_heads
from draftsmith.models.kernels.cuda_attention import can_split, has_split_attention, split_attention


def cache_shape(config: PreTrainedConfig, capacity: int) -> tuple[int, ...]:
    """Return the shape of the cache of a sequence: (layers, keys and values, 1, Hkv, capacity, Dh)."""
    return (config.num_hidden_layers, 2, 1, num_kv_heads(config), capacity, head_size(config))


def masked_columns(columns: Tensor, rows: Tensor, causal: bool, window: int | None) -> Tensor:
    """Return [R, S] bool, True for columns that a row does not see, by the places of both; the last place is a row's.

    Args:
        causal: Whether a row sees no later row.
        window: As in `CachedAttention`.
    """
    hidden = columns > (rows if causal else rows[-1:])[:, None]
    if window is not None:
        hidden = hidden | (columns <= rows[:, None] - window)
    return hidden.expand(len(rows), -1)


class CachedAttention(KVCache):
    """The KV cache of a drafter's layers, with the mask of the current step and attention over it.

    A causal step (`begin_step`) has R rows: the pending real tokens, then the K masks. All are written after the
    `length` cached real tokens; only the real ones are kept, by the caller moving `length`. Causal order is
    exactly group attention here, since the masks of the newest group come after every real token.

    Args:
        window: Number of tokens that a row sees, up to and including its own position; None: all. As in
            transformers, a row at position p sees no column up to p - window.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        super().__init__(capacity)
        one = torch.empty(cache_shape(config, 1)[2:], device=device, dtype=dtype)
        self.allocate(config.num_hidden_layers, one, one)
        self._repeats = config.num_attention_heads // one.shape[1]
        self._splits = device.type == "cuda" and has_split_attention(device, dtype)
        self._mask: Tensor | None = None
        self._window, self._first = window, 0  # the first column that the current step sees
        self._open = False  # whether a step without a mask sees everything
        self._causal = False  # whether the mask is that of causal order alone
        self._parents: list[int] | None = None  # of the nodes of a tree step that has no mask

    def begin_static_step(self, places: Tensor, hidden: Tensor) -> None:
        """Prepare a step that writes R rows at `places` and attends to the whole capacity.

        For compiled forwards, whose shapes are then always the same; `end_static_step` goes back to the others.

        Args:
            hidden: [R, capacity] bool, the columns that a row does not see; each sees one.
        """
        self.write_at(places, self.capacity)
        mask = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=hidden.device)
        self._mask, self._first = mask.masked_fill(hidden, float("-inf")), 0

    def end_static_step(self) -> None:
        """Go back to steps of any shape."""
        self.write_at(0, 0)
        self._mask = None

    def is_beyond_window(self, positions: int) -> bool:
        """Return True if the last of N `positions` after the committed tokens does not see all of these."""
        return self._window is not None and self.length + positions > self._window

    def begin_step(
        self, num_rows: int, causal: bool = True, has_mask: bool = True, parents: list[int] | None = None
    ) -> None:
        """Prepare a step of R rows and the mask that all its layers share; without `causal` the rows see each other.

        Args:
            has_mask: False for a causal step of `run` inside the window, which needs no mask.
            parents: Of the M nodes of a draft tree, of which the rows are the last; -1 for those below node 0.
        """
        end, first, mask = self.length + (num_rows if parents is None else len(parents)), 0, None
        begin, window = end - num_rows, self._window if has_mask and self.is_beyond_window(num_rows) else None
        if window is not None:
            first = max(begin + 1 - window, 0)  # the first column that the first row sees
            columns = torch.arange(first, end, device=self.keys.device)
            mask = zero_mask(num_rows, end - first, dtype=self.keys.dtype, device=columns.device)
            mask.masked_fill_(masked_columns(columns, columns[-num_rows:], causal, window), float("-inf"))
        elif causal and has_mask and begin > 0:
            shape, like = (num_rows, aligned(end)), self.keys
            mask = torch.full(shape, float("-inf"), dtype=like.dtype, device=like.device).triu_(begin + 1)[:, :end]
        self.write_at(begin, end)
        self._mask, self._first, self._parents = mask, first, parents
        self._causal, self._open = causal and window is None, not causal

    def run(
        self, layers: CpuLayers, inputs_re: Tensor, rotary: tuple[Tensor, Tensor], first_kept: int, with_logits: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the current step's rows through all layers in one call, and return what `CpuLayers.forward` does."""
        keys, values, first = self.keys, self.values, self._first
        start = self._columns_seen - len(inputs_re) - first
        if first:
            keys, values = keys[:, :, :, first:], values[:, :, :, first:]
        mask = None if self._causal else self._mask
        if mask is None and self._open:
            mask = keys.new_zeros(len(inputs_re), self._columns_seen - first)
        cos, sin = (part[0] for part in rotary)
        return layers.forward(inputs_re, (cos, sin), keys, values, start, mask, self._parents, first_kept, with_logits)

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """Return [1, R, H, Dh] for queries [1, H, R, Dh]; store the new keys and values [1, Hkv, R, Dh]."""
        keys, values = self.update(self.layers[layer_index], (k_bhrd, v_bhrd))
        if self._mask is None and not self._open:
            out = F.scaled_dot_product_attention(
                q_bhrd, k_bhrd, v_bhrd, is_causal=True, scale=scale, enable_gqa=self._repeats > 1
            )
            return out.transpose(1, 2)
        if self._first:
            keys, values = keys[:, :, self._first :], values[:, :, self._first :]
        mask = None if self._mask is None else self._mask[None, None]
        if mask is not None and can_attend(q_bhrd, mask):
            return torch.ops.draftsmith.attention(q_bhrd, keys, values, mask, scale)
        if self._splits and can_split(q_bhrd, keys, values, mask):
            return split_attention(q_bhrd, keys, values, mask, scale)
        if self._repeats == 1:
            return F.scaled_dot_product_attention(q_bhrd, keys, values, self._mask, scale=scale).transpose(1, 2)
        # Key heads as the batch and the query heads that share one as its heads: no key is copied.
        q_grouped = q_bhrd[0].unflatten(0, (-1, self._repeats))
        keys, values = (part[0].unsqueeze(1).expand(-1, self._repeats, -1, -1) for part in (keys, values))
        out = F.scaled_dot_product_attention(q_grouped, keys, values, self._mask, scale=scale)
        return out.flatten(0, 1).transpose(0, 1).unsqueeze(0)
