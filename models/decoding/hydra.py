"""Hydra at work on a sequence: a tree whose nodes carry what their head reads, without attention among them.

Shapes: P prompt, n newly committed tokens, W nodes of a call, D hidden, V vocabulary. "State" as in `hydra.py`.
"""

from typing import Any

import torch
from torch import Tensor

from draftsmith.models.decoding.cached import CachedDecoder


class HydraDecoder:
    """Hydra at work on a sequence, see `protocols.StepwiseDecoder`.

    A node's row is the state and the embeddings along its path, just as the head reads it: no attention in the tree.
    """

    def __init__(self, drafter: Any, max_length_tokens: int) -> None:
        self.num_depths = drafter.config.num_heads
        self._drafter = drafter
        self._prefix: _Newest | _AttendedPrefix = (
            _Newest() if drafter.prefix is None else _AttendedPrefix(drafter.prefix, max_length_tokens)
        )
        self._rows: list[Tensor] = []  # of node i, [(depth + 2) * D]
        self._depths: list[int] = []

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        self._prefix.start(prompt_ids, features, position_offset)

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        self._prefix.observe(committed_ids, features)

    @torch.inference_mode()
    def begin(self) -> Tensor:
        """fp32 logits [1, V] of the children of the newest committed token."""
        newest_id, state_1d = self._prefix.take()
        row = torch.cat([state_1d.to(self._drafter.dtype), self._drafter.embedded(newest_id)], dim=-1)
        self._rows, self._depths = [row[0]], [0]
        return self._drafter.logits_of(row, 0).float()

    @torch.inference_mode()
    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        """fp32 logits [W, V] of the children of W new nodes below `parents`."""
        if not self._depths or max(parents) >= len(self._depths):
            raise ValueError(f"parents {parents} must be among the {len(self._depths)} nodes there are: begin() first")
        depths = [self._depths[parent] + 1 for parent in parents]
        if max(depths) >= self.num_depths:
            raise ValueError(f"a node at depth {max(depths)} has no children: there are {self.num_depths} heads")
        embedded_wd = self._drafter.embedded(torch.tensor(tokens, device=self._drafter.device))
        rows = [
            torch.cat([self._rows[parent], embedded]) for parent, embedded in zip(parents, embedded_wd, strict=True)
        ]
        self._rows += rows
        self._depths += depths
        if len(set(depths)) == 1:  # a level of the tree, as trees are grown
            return self._drafter.logits_of(torch.stack(rows), depths[0]).float()
        one_by_one = (self._drafter.logits_of(row, depth) for row, depth in zip(rows, depths, strict=True))
        return torch.stack(list(one_by_one)).float()


class _Newest:
    """Without prefix attention nothing but the newest token and its feature is read."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, Tensor] | None = None

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        previous = features[-2:-1] if len(features) > 1 else torch.zeros_like(features)
        self._pending = prompt_ids[-1:], previous

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        if len(committed_ids):
            self._pending = committed_ids[-1:], features[-1:]

    def take(self) -> tuple[Tensor, Tensor]:
        """The newest committed token [1] and the state [1, D] before it."""
        if self._pending is None:
            raise ValueError("drafting needs a new token: call start() or observe() first")
        pending, self._pending = self._pending, None
        return pending


class _AttendedPrefix(CachedDecoder):
    """With it, every committed token's feature goes through the layer once."""

    def __init__(self, prefix: Any, max_length_tokens: int) -> None:
        super().__init__(prefix, max_length_tokens, extra_rows=0)
        self._dtype = prefix.dtype

    def take(self) -> tuple[Tensor, Tensor]:
        """The newest committed token [1] and the state [1, D] before it."""
        ids, features = self._take_pending()
        states_nd = self._causal_forward(features.to(self._dtype))
        self._cache.length += len(ids)
        return ids[-1:], states_nd[-1:]
