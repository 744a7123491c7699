"""The target at work on several sequences at once: one forward runs one draft tree of each.

Every row has its own committed length. Trees are padded to the largest; a padded node is seen by nobody. Rows come
(`add`) and go (`drop`) between rounds.

Shapes: A active rows, N nodes of the largest tree, P prompt, S tokens in the cache, F features, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.decoding.session import Session, TargetSession, TargetStep
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.models.attention_masks import open_mask
from draftsmith.models.decoding.growing_tree import LONGEST_TREE_NODES
from draftsmith.models.decoding.kv_cache import STATIC_ROPE_TYPES
from draftsmith.models.target.batch_tree_cache import BatchTreeCache
from draftsmith.models.target.features import FINAL_FEATURES
from draftsmith.recipes.errors import UserError


class BatchSession(Session):
    """`add` prompts, then rounds of `forward_trees` and `commit`; `drop` what has ended, or `extend` it.

    Args:
        target: The model, in eval mode.
        max_length_tokens: Prompt and answer of each row together must fit.
        batch_size: Rows at most; memory for all of them is allocated once.
        feature_layers: What the drafter reads; see `draftsmith.models.target.features.FeatureTap`.

    Raises:
        UserError: As `TargetSession`; or the target's rotation of a row depends on the other rows' lengths.
    """

    _cache: BatchTreeCache

    def __init__(
        self,
        target: Any,
        max_length_tokens: int,
        batch_size: int,
        feature_layers: tuple[int, ...] = (FINAL_FEATURES,),
    ) -> None:
        TargetSession(target, max_length_tokens).close()  # what cannot be decoded alone is refused there
        _check_rotation(target, max_length_tokens)
        super().__init__(target, max_length_tokens, feature_layers)
        self.batch_size = batch_size
        layers = target.config.get_text_config().num_hidden_layers
        self._cache = BatchTreeCache(layers, max_length_tokens + 1 + LONGEST_TREE_NODES, batch_size)
        self._columns = torch.arange(self._cache.capacity_tokens, device=self.device)

    @property
    def lengths_tokens(self) -> list[int]:
        """[A] committed tokens of each row: all but the newest."""
        return self._cache.lengths

    def reset(self) -> None:
        """Forget all rows."""
        self._cache.reset()

    def add(self, prompt_ids: list[int]) -> TargetStep:
        """Read a prompt into a new row, the last. Logits [1, V] of its last token, features [P, F]."""
        return self._read(len(self._cache.lengths), 0, prompt_ids, None)

    def extend(self, row: int, prompt_ids: list[int]) -> TargetStep:
        """Read on in a row whose committed tokens are the prompt's first. As `add`, features of what was read now."""
        start = self._cache.lengths[row]
        columns = self._columns[: len(prompt_ids)]
        hidden = columns > columns[start:, None]
        return self._read(row, start, prompt_ids, self._hiding(hidden)[None, None])

    def drop(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        with torch.inference_mode():
            self._cache.drop(row)

    def forward_trees(self, trees: list[DraftTree]) -> TargetStep:
        """Run one tree in each row. Logits [A, N, V] and features [A, N, F]; what is behind a tree's end is padding."""
        lengths, nodes = self._cache.lengths, max(map(len, trees))
        if self._cache.committed + nodes > self._cache.capacity_tokens:
            raise UserError(f"a draft tree of {nodes} nodes is too large: use at most {LONGEST_TREE_NODES}")
        # A padded node is another root to itself: its place is always a valid one.
        ids = [tree.tokens + [0] * (nodes - len(tree)) for tree in trees]
        places = [
            [length + depth for depth in tree.depths] + [length] * (nodes - len(tree))
            for length, tree in zip(lengths, trees, strict=True)
        ]
        ids_an, places_an = torch.tensor([ids, places], device=self.device)
        return self._run(ids_an, places_an, self._mask(trees, nodes))

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the accepted nodes (root first) of each row's tree in the last `forward_trees`."""
        with torch.inference_mode():
            self._cache.keep_rows(paths)

    def _read(self, row: int, start: int, prompt_ids: list[int], mask: Tensor | None) -> TargetStep:
        """The prompt from `start` on into one row. mask: additive, [1, 1, P - start, P]."""
        self.check_room(prompt_ids)
        places = self._columns[None, start : len(prompt_ids)]
        with self._cache.one_row(row, len(prompt_ids) - start):
            ids = torch.tensor([prompt_ids[start:]], device=self.device)
            step = self._run(ids, places, mask, **self._prefill_options)
        return TargetStep(step.logits[0, -1:], step.features[0])

    def _mask(self, trees: list[DraftTree], nodes: int) -> Tensor | None:
        """[A, 1, N, longest + N] additive: a row's own tokens, then its tree's ancestors."""
        start = self._cache.committed
        if nodes == 1 and min(self._cache.lengths) == start:
            return None  # nothing to hide, and the fastest attention kernels apply
        seen = torch.zeros(len(trees), nodes, nodes, dtype=torch.bool)
        for row, tree in enumerate(trees):
            seen[row, : len(tree), : len(tree)] = tree.shape.attention_mask
        lengths = torch.tensor(self._cache.lengths, device=self.device)
        hidden = (self._columns[:start] >= lengths[:, None])[:, None].expand(-1, nodes, -1)
        hidden = torch.cat([hidden, ~seen.to(self.device)], dim=-1)
        return self._hiding(hidden)[:, None]

    def _hiding(self, hidden: Tensor) -> Tensor:
        """Additive, of booleans [..., S]."""
        mask = open_mask(*hidden.shape, dtype=self._target.dtype, device=self.device)
        return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)


def _check_rotation(target: Any, max_length_tokens: int) -> None:
    """Some RoPE changes for all rows when one of them grows long; then no row would be what it is alone."""
    rope = getattr(target.config.get_text_config(), "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    unchanged = rope.get("original_max_position_embeddings") or max_length_tokens
    if kind not in STATIC_ROPE_TYPES and max_length_tokens > unchanged:
        raise UserError(
            f"the target's RoPE ({kind}) changes beyond {unchanged} tokens, for all rows of a batch when one of them "
            f"gets there: keep prompt and answer within {unchanged} tokens, or decode one sequence at a time"
        )
