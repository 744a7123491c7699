"""A language model on several continuations of one prompt, which share in one cache what they have in common.

A continuation is the tuple of its tokens after the prompt. Every token has a row of the cache, behind the committed
ones, and sees the prompt and the tokens of its own continuation: a tree that grows, and is cut to what is still alive.
What all living continuations begin with is committed, so that masks only tell apart where they differ.

Shapes: R rows of a forward, S rows in the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.decoding.session import cached_logits
from draftsmith.models.attention_masks import open_mask
from draftsmith.models.target.tree_cache import TreeCache

Continuation = tuple[int, ...]


class Continuations:
    """See the module's docstring.

    Args:
        model: In eval mode; one that draft trees run on (see `TargetSession`).
        prompt_ids: Read at once, with the logits of its last token.
        capacity_tokens: Rows of the cache, the prompt's included.
    """

    def __init__(self, model: Any, prompt_ids: list[int], capacity_tokens: int) -> None:
        self._model, self._device = model, model.device
        self._prompt_tokens = len(prompt_ids)
        self._cache = TreeCache(model.config.get_text_config().num_hidden_layers, capacity_tokens)
        self._common: Continuation = ()  # committed
        self._row_of: dict[Continuation, int] = {}  # behind the committed ones, ancestors first
        logits = self._forward(prompt_ids, torch.arange(len(prompt_ids)), None)
        self._cache.committed = len(prompt_ids)
        self._logits_of: dict[Continuation, Tensor] = {(): logits[-1]}
        self.forwards = 0

    def __contains__(self, continuation: Continuation) -> bool:
        """Whether its logits are known."""
        return continuation in self._logits_of

    def logits(self, continuations: list[Continuation]) -> Tensor:
        """[R, V] after each of them; those of which they are not known yet are run in one forward."""
        self.run(continuations)
        return torch.stack([self._logits_of[continuation] for continuation in continuations])

    @torch.inference_mode()
    def run(self, continuations: Iterable[Continuation]) -> None:
        """Make sure of their logits with one forward over the tokens that have no row yet, or none at all."""
        begin = len(self._common) + 1
        missing = {
            continuation[:length]: None
            for continuation in continuations
            for length in range(begin, len(continuation) + 1)
            if continuation[:length] not in self._row_of
        }
        if not missing:
            return
        new = sorted(missing, key=len)
        for continuation in new:
            self._row_of[continuation] = len(self._row_of)
        positions = torch.tensor([self._prompt_tokens + len(continuation) - 1 for continuation in new])
        logits = self._forward([continuation[-1] for continuation in new], positions, self._mask(new))
        self._cache.ahead += len(new)
        self._logits_of |= zip(new, logits, strict=True)
        self.forwards += 1

    @torch.inference_mode()
    def keep(self, living: list[Continuation]) -> None:
        """Forget all rows that none of these begins with."""
        kept = [c for c in self._row_of if any(alive[: len(c)] == c for alive in living)]
        common = [c for c in kept if all(alive[: len(c)] == c for alive in living)]
        self._cache.keep([self._row_of[continuation] for continuation in kept])
        self._common = common[-1] if common else self._common
        # The common ones come first: all others continue them.
        assert kept[: len(common)] == common
        self._row_of = {continuation: row for row, continuation in enumerate(kept[len(common) :])}
        self._cache.ahead = len(self._row_of)
        self._cache.committed -= len(self._row_of)
        self._logits_of = {c: logits for c, logits in self._logits_of.items() if c in living}

    def _mask(self, new: list[Continuation]) -> Tensor:
        """[1, 1, R, S] additive."""
        committed = self._cache.committed
        hidden = torch.ones(len(new), committed + len(self._row_of), dtype=torch.bool)
        hidden[:, :committed] = False
        for index, continuation in enumerate(new):
            for length in range(len(self._common) + 1, len(continuation) + 1):
                hidden[index, committed + self._row_of[continuation[:length]]] = False
        mask = open_mask(*hidden.shape, dtype=self._model.dtype, device=self._device)
        return mask.masked_fill_(hidden.to(self._device), torch.finfo(mask.dtype).min)[None, None]

    @torch.inference_mode()
    def _forward(self, token_ids: list[int], positions: Tensor, mask: Tensor | None) -> Tensor:
        """fp32 logits [R, V]."""
        ids = torch.tensor([token_ids], device=self._device)
        return cached_logits(self._model, self._cache, ids, positions[None].to(self._device), mask)[0].float()
