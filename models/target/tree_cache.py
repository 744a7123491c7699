"""A KV cache of fixed size: a forward writes after the committed tokens, and `keep` keeps the accepted path.

All layers are views of one tensor, so that moving an accepted path together is two operations, whatever their number.

Shapes: L layers, B batch (1), H key-value heads, S capacity in tokens, D head dimension, n new tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.models.device_tensors import to_device
from draftsmith.recipes.errors import UserError


class TreeCache(Cache):
    """The cache of one model. `committed` tokens are kept; whatever a forward wrote after them is a proposal.

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
