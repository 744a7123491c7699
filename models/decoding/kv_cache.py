"""KV caches: of the target, which keeps the accepted path of a tree, and of drafters; and tensors as devices want them.

CUDA's memory-efficient and cuDNN attention load 16 bytes at a time: in half precision the rows of a mask must begin at
multiples of 8 elements. Masks with any number of columns are therefore views of wider ones.

Shapes: L layers, B batch (1), H heads, Hkv key-value heads, S capacity in tokens or columns, R rows of a decode step,
n new tokens, D and Dh head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.models.cpu_kernels import can_attend
from draftsmith.recipes.errors import UserError

ALIGNMENT = 8  # elements


def aligned(columns: int) -> int:
    """The next multiple of the alignment."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def open_mask(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [..., R, S], which hide nothing, with rows that begin aligned."""
    return torch.zeros(*shape[:-1], aligned(shape[-1]), dtype=dtype, device=device)[..., : shape[-1]]


def to_device(values: Any, device: torch.device) -> Tensor:
    """A tensor, or nested lists of integers of equal lengths as an int64 tensor.

    A copy from ordinary memory waits for all that a GPU has to do; one from pinned memory joins the queue.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# ---- the target's ----


class TreeCache(Cache):
    """The cache of one transformers model: a forward writes after the committed tokens, `keep` keeps the accepted path.

    All layers are views of one tensor, so that moving an accepted path is two operations, whatever their number.
    `committed` tokens are kept; whatever a forward wrote after them is a proposal.

    `ahead` rows after the committed ones are part of the proposal too: the next forward writes after them. Zero where
    a tree is run in one forward.
    """

    def __init__(self, num_layers: int, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.committed = 0
        self.ahead = 0
        # [L, B, H, S, D], made when the first forward shows the sizes.
        self.all_keys: Tensor | None = None
        self.all_values: Tensor | None = None
        super().__init__(layers=[TreeCacheLayer(self, index) for index in range(num_layers)])

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make room for all layers, given one layer's keys and values [B, H, n, D]."""
        layers = len(self.layers)
        self.all_keys = keys.new_zeros(layers, *keys.shape[:2], self.capacity_tokens, keys.shape[3])
        self.all_values = values.new_zeros(layers, *values.shape[:2], self.capacity_tokens, values.shape[3])

    def room_of(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, D] of one layer."""
        assert self.all_keys is not None
        assert self.all_values is not None
        return self.all_keys[index], self.all_values[index]

    def keep(self, path: list[int]) -> None:
        """Commit the nodes of `path` (root first, ascending) of what the last forward wrote; forget the rest."""
        in_place = 0
        while in_place < len(path) and path[in_place] == in_place:
            in_place += 1
        start = self.committed
        if in_place < len(path):
            assert self.all_keys is not None
            assert self.all_values is not None
            source = to_device(path[in_place:], self.all_keys.device) + start
            for slab in (self.all_keys, self.all_values):
                slab.narrow(3, start + in_place, len(source)).copy_(slab.index_select(3, source))
        self.committed, self.ahead = start + len(path), 0

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.committed = self.ahead = 0


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view of the `TreeCache`."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take this layer's part of the cache's memory. Both [B, H, n, D]."""
        cache = self._cache
        if cache.all_keys is None:
            cache.allocate(key_states, value_states)
        self.keys, self.values = cache.room_of(self._index)
        for room, states in ((self.keys, key_states), (self.values, value_states)):
            if (room.shape[1], room.shape[3], room.device) != (states.shape[1], states.shape[3], states.device):
                raise UserError(
                    "the target's layers differ in key-value heads, head size or device, which the tree cache does not "
                    "support: use a target with equal layers on one device, such as Llama, Qwen, Mistral or GPT-2"
                )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write n tokens after what is there; returns views of both together, [B, H, committed + ahead + n, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self._cache.committed + self._cache.ahead, key_states.shape[2]
        assert self.keys is not None
        assert self.values is not None
        self.keys.narrow(2, start, count).copy_(key_states)
        self.values.narrow(2, start, count).copy_(value_states)
        return self.keys.narrow(2, 0, start + count), self.values.narrow(2, 0, start + count)

    def get_seq_length(self) -> int:
        return self._cache.committed + self._cache.ahead

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.capacity_tokens


# ---- a drafter's ----

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
