"""Attention over the cached keys and values of one sequence: `Attention` of `groups.layers`.

Shapes: H heads, Hkv key-value heads, R rows of a decode step, S columns, Dh head size, L layers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.models.cpu_kernels import can_attend
from draftsmith.models.device_tensors import ALIGNMENT, aligned, open_mask

# RoPE whose angles depend on nothing but the position, so that a table of them can be made once.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def cache_shape(config: PreTrainedConfig, batch_size: int, capacity: int) -> tuple[int, ...]:
    """(layers, keys and values, B, Hkv, capacity, Dh) of what these layers keep of B sequences."""
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return (config.num_hidden_layers, 2, batch_size, num_kv_heads, capacity, head_size)


class CachedAttention:
    """Keys and values of one sequence for all layers, and the mask of the step at work.

    A causal step (`begin_step`) has R rows: the pending real tokens, then the K masks. All are written behind the
    `length` real tokens that are there; only the real ones are kept, by the caller moving `length`. Causal order is
    exactly group attention here, since the masks of the newest group come after every real token.
    A tree step (`begin_tree_step`) adds R nodes of a draft tree behind the `length` tokens and the nodes before them.
    """

    def __init__(
        self, config: PreTrainedConfig, capacity: int, max_rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        capacity = aligned(capacity)
        self._keys_values = torch.zeros(cache_shape(config, 1, capacity), device=device, dtype=dtype)
        self.capacity, self.length = capacity, 0
        self._begin = 0  # where the rows of the step at work are written
        self._repeats = config.num_attention_heads // self._keys_values.shape[3]
        # Row r may see columns <= length + r. A band holds this mask for every length: slices of it, not new masks.
        # There is one for each remainder of the length, so that every slice begins aligned.
        shape = (ALIGNMENT, max_rows, capacity + aligned(max_rows))
        bands = torch.full(shape, float("-inf"), device=device, dtype=dtype)
        for remainder, band in enumerate(bands):
            band.triu_(capacity + 1 - (-remainder % ALIGNMENT))
        self._bands = bands
        self._mask: Tensor | None = None
        self._open = False  # whether a step without a mask sees everything
        self._places: Tensor | None = None

    def hold_still(self) -> None:
        """Tell the compiler that the memory never moves: CUDA graphs refuse to write into any other."""
        torch._dynamo.mark_static_address(self._keys_values)

    def begin_static_step(self, places: Tensor, mask: Tensor) -> None:
        """Prepare a step that writes R rows at `places` and attends to the whole capacity; mask [R, capacity].

        For compiled forwards, whose shapes are then always the same; `end_static_step` goes back to the others.
        """
        self._places, self._mask = places, mask

    def end_static_step(self) -> None:
        """The step is done."""
        self._places = self._mask = None

    def append(self, keys_values: Tensor) -> None:
        """Put those of all layers [L, 2, 1, Hkv, n, Dh] behind the `length` that are there, and move that on."""
        end = self.length + keys_values.shape[4]
        self._keys_values[..., self.length : end, :] = keys_values
        self.length = end

    def store_at(self, places: Tensor, keys_values: Tensor) -> None:
        """Put those of all layers [L, 2, 1, Hkv, n, Dh] at `places`; for compiled forwards."""
        self._keys_values.index_copy_(4, places, keys_values)

    def begin_step(self, num_rows: int, causal: bool = True) -> None:
        """Prepare the mask that all layers of this step share; without `causal` its rows see each other."""
        self._begin = self.length
        end = self.length + num_rows
        self._open = not causal
        if self.length == 0 or not causal:
            self._mask = None
            return
        bands = self._bands
        if num_rows <= bands.shape[1]:
            first = self.capacity - aligned(self.length)
            self._mask = bands[self.length % ALIGNMENT, :num_rows, first : first + end]
        else:
            mask = open_mask(num_rows, end, dtype=bands.dtype, device=bands.device).fill_(float("-inf"))
            self._mask = mask.triu_(self.length + 1)

    def begin_tree_step(self, ancestors: Tensor) -> None:
        """Prepare a step of R nodes. ancestors: [R, M] bool, whether a row sees each of the M nodes there will be then.

        The last R of the M nodes are the step's own; all real tokens are seen by every node.
        """
        num_rows, num_nodes = ancestors.shape
        self._begin, self._open = self.length + num_nodes - num_rows, False
        keys_values = self._keys_values
        mask = open_mask(num_rows, self.length + num_nodes, dtype=keys_values.dtype, device=keys_values.device)
        mask[:, self.length :].masked_fill_(~ancestors.to(mask.device), float("-inf"))
        self._mask = mask

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[1, R, H, Dh] for queries [1, H, R, Dh]; stores the new keys and values [1, Hkv, R, Dh]."""
        keys, values = self._keys_values[layer_index]
        if self._places is None:
            begin, end = self._begin, self._begin + q_bhrd.shape[2]
            keys[:, :, begin:end] = k_bhrd
            values[:, :, begin:end] = v_bhrd
        else:
            end = self.capacity
            keys.index_copy_(2, self._places, k_bhrd)
            values.index_copy_(2, self._places, v_bhrd)
        if self._mask is None and not self._open:
            out = F.scaled_dot_product_attention(
                q_bhrd, k_bhrd, v_bhrd, is_causal=True, scale=scale, enable_gqa=self._repeats > 1
            )
            return out.transpose(1, 2)
        keys, values = keys[:, :, :end], values[:, :, :end]
        mask = None if self._mask is None else self._mask[None, None]
        if mask is not None and can_attend(q_bhrd, mask):
            return torch.ops.draftsmith.attention(q_bhrd, keys, values, mask, scale)
        if self._repeats == 1:
            return F.scaled_dot_product_attention(q_bhrd, keys, values, self._mask, scale=scale).transpose(1, 2)
        # Key heads as the batch and the query heads that share one as its heads: no key is copied.
        q_grouped = q_bhrd[0].unflatten(0, (-1, self._repeats))
        keys, values = (part[0].unsqueeze(1).expand(-1, self._repeats, -1, -1) for part in (keys, values))
        out = F.scaled_dot_product_attention(q_grouped, keys, values, self._mask, scale=scale)
        return out.flatten(0, 1).transpose(0, 1).unsqueeze(0)
