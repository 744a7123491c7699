"""Several sequences at once on one target: one forward reads the weights for all of them.

Their keys and values lie in one cache, in pages that take turns: token t of sequence s is at column

    (t // PAGE * n + s) * PAGE + t % PAGE,    n sequences

so that the columns in use are about n times the longest. A mask hides from every row what is not of its own sequence;
our attention kernel reads what a row sees and nothing else, and sums it in the sequence's own order: a token has the
same bits alone and beside others, wherever it lies.

Shapes: N rows of all trees, S columns, n sequences, V vocabulary, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.decoding.compiled_session import CompiledSession
from draftsmith.eval.decoding.session import TargetSession, TargetStep
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.compiling import compiles_by_default
from draftsmith.models.decoding.decoders import LONGEST_TREE_NODES
from draftsmith.models.decoding.kv_cache import open_mask, to_device
from draftsmith.models.target.windows import Masks

PAGE = 64


class SharedSession(CompiledSession):
    """A session of several sequences; as a `TargetSession` it is that of the sequence `current`.

    Args:
        sequences: n.
        compiles: As in `open_session`.

    Raises:
        UserError: As `CompiledSession`.
    """

    def __init__(self, target: Any, max_length_tokens: int, sequences: int, compiles: bool | None) -> None:
        self.sequences, self.current = sequences, 0
        self._lengths = [0] * sequences  # committed tokens of each
        self._where = torch.empty(0)
        TargetSession(target, 8).close()  # a target that cannot run trees is refused here
        compiled = compiles or (compiles is None and compiles_by_default(target.device))
        super().__init__(target, max_length_tokens, must=bool(compiles))
        self._compiles = self._compiles and bool(compiled)
        token_t = torch.arange(self._pages(max_length_tokens) * PAGE, device=self.device)
        page_t = token_t // PAGE * sequences * PAGE + token_t % PAGE
        self._columns = [page_t + number * PAGE for number in range(sequences)]

    @staticmethod
    def _pages(max_length_tokens: int) -> int:
        return -(-(max_length_tokens + 1 + LONGEST_TREE_NODES) // PAGE)

    def _capacity_tokens(self, max_length_tokens: int) -> int:
        # One more, as no compiled forward attends to all of them.
        return (self._pages(max_length_tokens) * self.sequences + 1) * PAGE

    @property
    def length_tokens(self) -> int:
        """Committed tokens of the current sequence: all but the newest."""
        return self._lengths[self.current]

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int]) -> TargetStep:
        """Forget what the current sequence was and read a prompt."""
        self.check_room(prompt_ids)
        if self._few_rows is not None:
            self._few_rows.refresh()
        length = len(prompt_ids)
        self._where = self._columns[self.current][:length]
        ids = to_device([prompt_ids], self.device)
        step = self._run(ids, self._positions[:, :length], None, **self._prefill_options)
        self._lengths[self.current] = length
        return TargetStep(step.logits[0, -1:], step.features[0])

    @torch.inference_mode()
    def forward_tree(self, tree: DraftTree) -> TargetStep:
        """Run all nodes of a tree of the current sequence. Nothing is kept until `commit`."""
        return self.forward_trees([(self.current, tree)])[0]

    @torch.inference_mode()
    def forward_trees(self, trees: Sequence[tuple[int, DraftTree]]) -> list[TargetStep]:
        """Run trees of different sequences, each with its number, in one forward; nothing is kept until `commit`."""
        sizes = [len(tree) for _, tree in trees]
        rows = sum(sizes)
        # As in `CompiledSession`. Sequences that look past a window share a forward with those that do not yet.
        slides = any(self._windows.reached(self._lengths[number] + len(tree)) for number, tree in trees)
        self._size = self._size_of(rows) if self._compiles and not slides else 0
        padded = [tree for _, tree in trees]
        if missing := max(0, self._size - rows):  # behind the last sequence's own nodes, which do not see them
            last = padded[-1]
            padded[-1] = DraftTree([*last.tokens, *[0] * missing], TreeShape.of((*last.parents, *[0] * missing)))
        tokens, positions, places, longest = list[int](), list[int](), list[Tensor](), 0
        for (number, _), tree in zip(trees, padded, strict=True):
            start = self._lengths[number]
            tokens += tree.tokens
            positions += [start + depth for depth in tree.depths]
            places.append(self._columns[number][start : start + len(tree)])
            longest = max(longest, start + len(tree))
        columns = -(-longest // PAGE) * self.sequences * PAGE
        if self._static and self._size:
            columns = self._cache.capacity_tokens
        self._where = torch.cat(places)
        of_full_attention = self._mask_of([number for number, _ in trees], padded, columns)
        mask: Masks = of_full_attention
        ids, positions_n = to_device([tokens, positions], self.device)
        if slides:
            mask = self._windows.masks(of_full_attention, positions_n, self._key_positions(trees, columns))
        step = self._run(ids[None], positions_n[None], mask)
        logits, features = step.logits[0, :rows].split(sizes), step.features[0, :rows].split(sizes)
        return [TargetStep(*parts) for parts in zip(logits, features, strict=True)]

    def _mask_of(self, numbers: Sequence[int], trees: Sequence[DraftTree], columns: int) -> Tensor:
        """[1, 1, N, S] additive."""
        rows = sum(map(len, trees))
        mask = open_mask(1, 1, rows, columns, dtype=self._target.dtype, device=self.device).fill_(self._closed)
        first = 0
        for number, tree in zip(numbers, trees, strict=True):
            start, of_sequence = self._lengths[number], self._columns[number]
            own = mask[0, 0, first : first + len(tree)]
            own.index_fill_(1, of_sequence[:start], 0.0)
            seen = tree.shape.attention_mask
            bias = torch.zeros(seen.shape, dtype=mask.dtype).masked_fill_(~seen, self._closed)
            own.index_copy_(1, of_sequence[start : start + len(tree)], to_device(bias, self.device))
            first += len(tree)
        return mask

    def _key_positions(self, trees: Sequence[tuple[int, DraftTree]], columns: int) -> Tensor:
        """[S] of the sequences that have a tree; what others have is hidden from these."""
        key_s = torch.zeros(columns, dtype=torch.long, device=self.device)
        for number, tree in trees:
            start = self._lengths[number]
            positions = [*range(start), *(start + depth for depth in tree.depths)]
            key_s[self._columns[number][: len(positions)]] = to_device(positions, self.device)
        return key_s

    def _places_of(self, rows: int) -> Tensor:
        return self._where

    def _run_as_it_is(self, ids: Tensor, positions: Tensor, mask: Masks | None, **options: Any) -> TargetStep:
        one = next(iter(mask.values())) if isinstance(mask, dict) else mask
        self._cache.places, self._cache.view_tokens = self._where, 0 if one is None else one.shape[-1]
        try:
            step = TargetSession._run(self, ids, positions, mask, **options)
        finally:
            self._cache.places = None
        return TargetStep(step.logits, self._wanted(step.features))

    @torch.inference_mode()
    def commit(self, path: list[int], sequence: int | None = None) -> None:
        """Keep the accepted nodes (root first) of a sequence's last tree."""
        number = self.current if sequence is None else sequence
        in_place = next((place for place, node in enumerate(path) if node != place), len(path))
        start, columns = self._lengths[number], self._columns[number]
        if in_place < len(path):
            cache = self._cache
            assert cache.all_keys is not None
            assert cache.all_values is not None
            source = columns[to_device(path[in_place:], self.device) + start]
            to = columns[start + in_place : start + len(path)]
            for slab in (cache.all_keys, cache.all_values):
                slab.index_copy_(3, to, slab.index_select(3, source))
        self._lengths[number] = start + len(path)
