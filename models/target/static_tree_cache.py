"""A tree cache whose forward has the same shapes and addresses every round, as compiled graphs want it.

A forward writes at `places` and hands out the first `view_tokens` columns; the mask hides what is not there.
Prompts have any length: they are read without compilation, as `TreeCache` does it (`places` is None then).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.models.target.tree_cache import TreeCache, TreeCacheLayer


class StaticTreeCache(TreeCache):
    """See the module's docstring."""

    def __init__(self, num_layers: int, capacity_tokens: int) -> None:
        self.places: Tensor | None = None  # [n] columns that the compiled forward writes
        self.view_tokens = capacity_tokens
        super().__init__(num_layers, capacity_tokens)
        self.layers = [StaticTreeCacheLayer(self, index) for index in range(num_layers)]


class StaticTreeCacheLayer(TreeCacheLayer):
    """One layer's view of the `StaticTreeCache`."""

    is_compileable = True

    def __init__(self, cache: StaticTreeCache, index: int) -> None:
        super().__init__(cache, index)
        self._static = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        torch._dynamo.mark_static_address(self.keys)
        torch._dynamo.mark_static_address(self.values)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write n tokens; returns always the same columns [B, H, view, D] in compiled forwards."""
        places = self._static.places
        if places is None:
            return super().update(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        view = self._static.view_tokens
        return self.keys.narrow(2, 0, view), self.values.narrow(2, 0, view)

    def get_seq_length(self) -> int:
        # Positions are always given, so nobody computes with this: a number that changes would compile anew.
        return super().get_seq_length() if self._static.places is None else 0
