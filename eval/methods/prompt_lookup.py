"""Prompt lookup decoding: what followed the newest tokens the last time they occurred (Saxena, 2023; LLMA, 2304.04487).

The longest of the last n-grams that occurred before wins, and of its occurrences the latest. No model at all.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from draftsmith.eval.methods.registry import MethodSetting
from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.recipes.schema import Section


class PromptLookup:
    """See the module's docstring.

    Args:
        name: The row of the table.
        max_ngram: The longest n-gram that is looked up; shorter ones follow, down to single tokens.
        num_tokens: Drafted at most.
    """

    class Options(Section):
        """Defaults are Spec-Bench's setting."""

        max_ngram: int = Field(3, ge=1)
        num_tokens: int = Field(10, ge=1)

    def __init__(self, name: str, max_ngram: int = 3, num_tokens: int = 10) -> None:
        self.name = name
        self._max_ngram, self._num_tokens = max_ngram, num_tokens
        self._ids: list[int] = []
        # From an n-gram to the place after its latest occurrence, the one at the very end excepted.
        self._after: dict[tuple[int, ...], int] = {}

    @classmethod
    def make(cls, options: Options, setting: MethodSetting) -> PromptLookup:
        return cls(setting.recipe.name, options.max_ngram, options.num_tokens)

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        self._ids, self._after = [], {}
        self._append(prompt_ids)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        self._append(committed_ids)

    def propose(self) -> DraftTree:
        found = self._continuation()
        return DraftTree([self._ids[-1], *found], TreeShape.chain(len(found)))

    def _continuation(self) -> list[int]:
        for size in range(self._max_ngram, 0, -1):
            place = self._after.get(tuple(self._ids[-size:]))
            if place is not None:
                return self._ids[place : place + self._num_tokens]
        return []

    def _append(self, ids: list[int]) -> None:
        for token in ids:
            # Only now something follows the n-grams that ended here.
            place = len(self._ids)
            for size in range(1, min(self._max_ngram, place) + 1):
                self._after[tuple(self._ids[place - size : place])] = place
            self._ids.append(token)


METHOD = PromptLookup
