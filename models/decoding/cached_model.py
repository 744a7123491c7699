"""A causal language model with its KV cache: how a forward runs that nothing has compiled, in one call on a CPU.

Shapes: N rows of a forward, S columns of the cache, L layers, G key-value heads, D head size, F features, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.errors import UserError
from draftsmith.models.decoding.kv_cache import KVCache
from draftsmith.models.decoding.recurrent import ChainStates, cache_layers
from draftsmith.models.kernels.cpu_layers import MOST_CALL_ROWS, CpuTarget
from draftsmith.models.target.features import FeatureTap
from draftsmith.models.target.windows import Masks, has_recurrent_layers


class CachedModel:
    """A causal language model that reads and writes a KV cache.

    On a CPU a forward is one call, if `CpuTarget` supports the model. Elsewhere the first prompt allocates the cache.

    Args:
        model: In eval mode; any that takes a 4-D attention mask and a transformers `Cache`.
        feature_layers: Layers that `run` returns the hidden states of.
        is_static: Whether compiled forwards write into the cache too.
    """

    def __init__(
        self, model: Any, cache: KVCache, feature_layers: tuple[int, ...] = (), is_static: bool = False
    ) -> None:
        self.model, self.cache = model, cache
        self.feature_layers, self.tap = feature_layers, FeatureTap(model, feature_layers)
        self.cpu_target = CpuTarget.of(model, cache.capacity)
        if self.cpu_target is not None:
            self.cpu_target.allocate(cache)
        layers = cache_layers(model, 1, lambda number, count: TreeCacheLayer(cache, number, count, is_static))
        self.states = ChainStates(layers) if has_recurrent_layers(model) else None
        self._layers = Cache(layers=layers)
        takes = inspect.signature(model.forward).parameters
        self._last_logits: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def read_layers(self, feature_layers: tuple[int, ...]) -> None:
        """Return the hidden states of other layers from now on."""
        if feature_layers != self.feature_layers:
            self.tap.close()
            self.feature_layers, self.tap = feature_layers, FeatureTap(self.model, feature_layers)

    def refresh(self) -> None:
        """Read the weights again if they changed; called before a sequence."""
        if self.cpu_target is not None:
            self.cpu_target.refresh()

    def is_one_call(self, num_rows: int) -> bool:
        """Return True if a forward of this many rows is one call."""
        return self.cpu_target is not None and num_rows <= MOST_CALL_ROWS

    def read_prompt(self, ids: Tensor, positions: Tensor, places: int | Tensor, slides: bool) -> tuple[Tensor, Tensor]:
        """Run the first rows of a sequence; the last one's logits [1, V], and features [N, F].

        Args:
            ids, positions: [N].
            places: As in `KVCache.write_at`.
            slides: Whether some layer does not see all rows.
        """
        if self.cpu_target is not None and not slides:
            return self._read_in_calls(ids.tolist(), places)
        self.cache.write_at(places, 0)
        logits = self.logits(ids[None], positions[None], None, **self._last_logits)
        return logits[0, -1:], self.tap.take()[0]

    def _read_in_calls(self, tokens: list[int], places: int | Tensor) -> tuple[Tensor, Tensor]:
        """Run a prompt in calls of at most `MOST_CALL_ROWS` rows; as `read_prompt`."""
        parts, logits, mask = [], torch.empty(0), None
        for first in range(0, len(tokens), MOST_CALL_ROWS):
            rows = range(first, min(first + MOST_CALL_ROWS, len(tokens)))
            where: int | Tensor = first
            if isinstance(places, Tensor):
                where = places[first : rows.stop]
                mask = torch.full((len(rows), int(where[-1]) + 1), -1.0, dtype=self.cache.keys.dtype)
                mask[:, places[: rows.stop]] = torch.full((len(rows), rows.stop), -1.0).triu(first + 1).to(mask.dtype)
            skipped = len(rows) - (rows.stop == len(tokens))
            logits, features = self.run_in_one_call(tokens[first : rows.stop], rows, where, mask, first_kept=skipped)
            parts.append(features)
        return logits, torch.cat(parts)

    def run(
        self, ids: Tensor, positions: Tensor, places: int | Tensor, columns: int, mask: Masks | None
    ) -> tuple[Tensor, Tensor]:
        """Run rows, whose keys and values join the cache; logits [N, V] and features [N, F].

        Args:
            ids, positions: [N].
            places, columns: As in `KVCache.write_at`.
            mask: [1, 1, N, columns] additive, or one for each type of layer. None: causal.
        """
        if not isinstance(mask, dict) and self.is_one_call(len(ids)):
            return self.run_in_one_call(ids.tolist(), positions.tolist(), places, None if mask is None else mask[0, 0])
        self.cache.write_at(places, columns)
        logits = self.logits(ids[None], positions[None], mask)
        return logits[0], self.tap.take()[0] if self.feature_layers else logits[0, :, :0]

    def run_in_one_call(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        places: int | Tensor,
        mask: Tensor | None = None,
        parents: Sequence[int] | None = None,
        first_kept: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Run rows as `CpuTarget.forward` does, where `is_one_call`; logits [N - first_kept, V], features [N, F]."""
        assert self.cpu_target is not None
        start, scattered = (0, places) if isinstance(places, Tensor) else (places, None)
        return self.cpu_target.forward(
            tokens, positions, self.cache.keys, self.cache.values, start, self.feature_layers, mask, parents, scattered,
            first_kept,
        )  # fmt: skip

    def logits(self, ids: Tensor, positions: Tensor, mask: Masks | None, **options: Any) -> Tensor:
        """Run the model itself; logits [1, N, V] of ids and positions [1, N]."""
        where = {"position_ids": positions, "attention_mask": mask, "past_key_values": self._layers}
        logits: Tensor = self.model(input_ids=ids, use_cache=True, **where, **options).logits
        return logits


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view of a `KVCache`, for transformers."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: KVCache, index: int, num_layers: int, is_static: bool) -> None:
        super().__init__()
        self._cache, self._index, self._num_layers, self.is_compileable = cache, index, num_layers, is_static

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take this layer's part of the cache's memory, which the first layer makes. Both [1, G, n, D]."""
        cache = self._cache
        if not cache.layers:
            cache.allocate(self._num_layers, key_states, value_states)
        self.keys, self.values = cache.layers[self._index]
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            if (held.shape[1], held.shape[3], held.device) != (states.shape[1], states.shape[3], states.device):
                raise UserError(
                    "the target's layers differ in key-value heads, head size or device, which the tree cache does not "
                    "support: use a target with equal layers on one device, such as Llama, Qwen, Mistral or GPT-2"
                )
            if self.is_compileable:
                torch._dynamo.mark_static_address(held)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, G, n, D]; return those that the rows attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self._cache.update((self.keys, self.values), (key_states, value_states))

    def get_seq_length(self) -> int:
        # Not used, as positions are always given; a changing number would cause recompilation.
        places = self._cache._places
        return 0 if isinstance(places, Tensor) else places

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.capacity
