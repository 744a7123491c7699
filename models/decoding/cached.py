"""The decode side of drafters made of decoder layers: a queue of final tokens and a KV cache of their rows.

`ParallelDecoder` drafts all depths in one forward; `TreeDecoder` grows a tree level by level.
Nothing is ever rolled back: committed tokens are final, and the rows of drafted ones are overwritten.

Shapes: G depths, K masks, P prompt, n newly committed, R rows of a forward, W nodes of a call, M nodes so far, E input
width of a layer, F features, D hidden, V columns of the logits.
"""

from typing import Any

import torch
from torch import Tensor

from draftsmith.models.compiling import BACKEND
from draftsmith.models.decoding.growing_tree import LONGEST_TREE_NODES, GrowingTree, nodes_on
from draftsmith.models.decoding.kv_cache import STATIC_ROPE_TYPES, CachedAttention
from draftsmith.models.decoding.static_layers import LONGEST_STATIC_ROWS, StaticLayers

# Pending tokens up to this many use masks that were made beforehand.
SMALL_STEP_TOKENS = 16


class CachedDecoder:
    """What both kinds share: one sequence at a time, its pending tokens, its cache and its positions.

    Args:
        drafter: Has `layers_config`, `reads_first_token`, `real_inputs`, `run_layers`, `rotary_of`, `logits_of`, as
            `GroupWiseDrafter` has.
        max_length_tokens: Committed tokens that fit, the prompt included.
        extra_rows: Drafted rows that one forward, or one tree, may hold behind them.
    """

    def __init__(self, drafter: Any, max_length_tokens: int, extra_rows: int) -> None:
        self._drafter, self._max_length_tokens, self._device = drafter, max_length_tokens, drafter.device
        self._extra_rows = extra_rows
        self._cache = self._make_cache(max_length_tokens + extra_rows)
        self._static: StaticLayers | None = None
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._position_offset = 0
        self._rotary_table: tuple[Tensor, Tensor] | None = None

    def compile(self, backend: str = BACKEND) -> None:
        """Compile what a round runs, before the first sequence; prompts are read as before."""
        # Behind the rows that are wanted stands padding.
        self._cache = self._make_cache(self._max_length_tokens + self._extra_rows + LONGEST_STATIC_ROWS)
        self._static = StaticLayers(self._drafter, self._cache, backend)

    def _make_cache(self, capacity: int) -> CachedAttention:
        small_step = SMALL_STEP_TOKENS + min(self._extra_rows, SMALL_STEP_TOKENS)
        return CachedAttention(self._drafter.layers_config, capacity, small_step, self._device, self._drafter.dtype)

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        """Begin a sequence whose first token has position id `position_offset`. ids [P], features [P, F] AT them."""
        self._cache.length = 0
        self._pending, skipped = first_rows(self._drafter, prompt_ids, features)
        self._position_offset = position_offset + skipped
        self._rotary_table = self._make_rotary_table()

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Queue final tokens [n] with the features [n, F] that predicted them."""
        if len(committed_ids):
            self._pending.append((committed_ids, features))

    def _take_pending(self) -> tuple[Tensor, Tensor]:
        """Ids [n] and features [n, F] of all that is queued."""
        if not self._pending:
            raise ValueError("drafting needs a new token: call start() or observe() first")
        queued = self._pending
        ids, features = queued[0] if len(queued) == 1 else map(torch.cat, zip(*queued, strict=True))
        length = self._cache.length + len(ids)
        if length > self._max_length_tokens:
            raise ValueError(
                f"{length} tokens, but decoder(max_length_tokens={self._max_length_tokens}): make it larger"
            )
        self._pending = []
        return ids, features

    def _causal_forward(self, inputs_re: Tensor) -> Tensor:
        """[R, D] of rows that follow the cached ones in order."""
        begin, num_rows = self._cache.length, len(inputs_re)
        hidden = inputs_re.unsqueeze(0)
        self._cache.begin_step(num_rows)
        rotary = self._rotary_of(hidden, slice(begin, begin + num_rows))
        return self._drafter.run_layers(hidden, rotary, cached_attention=self._cache)[0]

    def _causal_logits(self, inputs_re: Tensor, first_kept: int) -> tuple[Tensor, Tensor]:
        """Of such rows from `first_kept` on, compiled or not: hidden [k, D] and fp32 logits [k, V]."""
        if self._static is not None and len(inputs_re) <= LONGEST_STATIC_ROWS:
            return self._static.causal(inputs_re, first_kept, self._rotary_of)
        kept = self._causal_forward(inputs_re)[first_kept:]
        return kept, self._drafter.logits_of(kept).float()

    def _make_rotary_table(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin of all positions, where they depend on the position only."""
        rope = getattr(self._drafter.layers_config, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") not in STATIC_ROPE_TYPES:
            return None
        positions = torch.arange(self._cache.capacity, device=self._device).unsqueeze(0) + self._position_offset
        return self._drafter.rotary_of(torch.empty(0, device=self._device, dtype=self._drafter.dtype), positions)

    def _rotary_of(self, hidden: Tensor, where: slice | Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, R, Dh] at these places of the sequence."""
        if self._rotary_table is not None:
            cos, sin = self._rotary_table
            return cos[:, where], sin[:, where]
        places = torch.arange(where.start, where.stop, device=self._device) if isinstance(where, slice) else where
        return self._drafter.rotary_of(hidden, places.unsqueeze(0) + self._position_offset)


def first_rows(drafter: Any, prompt_ids: Tensor, features: Tensor) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """What a prompt begins with, ids [n] and features [n, F] before them, and how many of its tokens have no row.

    A prompt of a single token keeps its row, since a draft may be asked for at once.
    """
    if not drafter.reads_first_token and len(prompt_ids) > 1:
        return [(prompt_ids[1:], features[:-1])], 1
    return [(prompt_ids, torch.cat([torch.zeros_like(features[:1]), features[:-1]]))], 0


class ParallelDecoder(CachedDecoder):
    """For group-wise drafters; see `protocols.DrafterDecoder`."""

    def __init__(self, drafter: Any, max_length_tokens: int) -> None:
        super().__init__(drafter, max_length_tokens, extra_rows=drafter.config.num_masks)
        self.columns = drafter.columns
        self._masks_ke, self._mask_residual = drafter.mask_inputs().detach(), drafter.mask_residual

    @torch.inference_mode()
    def draft(self) -> Tensor:
        """fp32 logits [G, V] of depths 1..G after the newest committed token, from one forward over n+K rows."""
        ids, features = self._take_pending()
        real_ne = self._drafter.real_inputs(ids, features)
        masks_ke = self._masks_ke + real_ne[-1:] if self._mask_residual else self._masks_ke
        _, logits_gv = self._causal_logits(torch.cat([real_ne, masks_ke]), len(ids) - 1)
        # The masks' keys and values lie behind `length`: the next round overwrites them.
        self._cache.length += len(ids)
        return logits_gv


class TreeDecoder(CachedDecoder):
    """For drafters that read their own output (EAGLE); see `protocols.StepwiseDecoder`.

    A drafted node stands where the committed tokens end plus its depth, sees all of them and its own ancestors, and
    reads its parent's output (`drafted_inputs`) in place of the target's feature.
    """

    def __init__(self, drafter: Any, max_length_tokens: int, num_depths: int) -> None:
        super().__init__(drafter, max_length_tokens, extra_rows=LONGEST_TREE_NODES)
        self.num_depths, self.columns = num_depths, drafter.columns
        self._tree = GrowingTree(self._device)
        self._feedback_md = torch.empty(0)

    @torch.inference_mode()
    def begin(self) -> Tensor:
        """fp32 logits [1, V] of the children of the newest committed token."""
        ids, features = self._take_pending()
        newest_1d, logits_1v = self._causal_logits(self._drafter.real_inputs(ids, features), len(ids) - 1)
        self._cache.length += len(ids)
        self._feedback_md = newest_1d
        self._tree.begin()
        return logits_1v

    @torch.inference_mode()
    def expand(self, tokens: Tensor | list[int], parents: list[int]) -> Tensor:
        """fp32 logits [W, V] of the children of W new nodes below `parents`."""
        ids, parents_w = nodes_on(tokens, parents, self._device)
        seen, depths = self._tree.add(parents, parents_w)
        above = self._feedback_md.index_select(0, parents_w)
        hidden = self._drafter.drafted_inputs(ids, above).unsqueeze(0)
        places = depths + (self._cache.length - 1)
        if self._static is not None and len(tokens) <= LONGEST_STATIC_ROWS:
            hidden_wd, logits_wv = self._static.tree(hidden[0], places, seen, self._rotary_of)
        else:
            self._cache.begin_tree_step(seen)
            rotary = self._rotary_of(hidden, places)
            hidden_wd = self._drafter.run_layers(hidden, rotary, cached_attention=self._cache)[0]
            logits_wv = self._drafter.logits_of(hidden_wd).float()
        self._feedback_md = torch.cat([self._feedback_md, hidden_wd])
        return logits_wv
