"""Prompt lookup decoding: draft the tokens after an earlier occurrence of the newest ones (Saxena; LLMA, 2304.04487).

The longest n-gram at the end of the text that also occurs earlier is used. Implementations differ in which occurrence
they take, and in whether fewer tokens may follow it than are to be drafted:

| setting                                          | options                                      |
|--------------------------------------------------|----------------------------------------------|
| Spec-Bench (its model/pld/pld.py), the default   | `match: earliest`, `partial: false`          |
| transformers 5.19 (`candidate_generator.py`)     | `match: earliest`, `partial: true`           |
| ours                                             | `match: latest`, `partial: true`             |

tau on the embedded target: 1.53, 1.59 (both with `max_ngram: 3`) and 1.58. Spec-Bench's code drafts token 100 where it
finds nothing, which we do not. No draft model is needed.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from draftsmith.eval.decoding.method import Method
from draftsmith.eval.methods.registry import DecodingSetting
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.recipes.schema import Section


class PromptLookup(Method):
    """Method `prompt_lookup` of a recipe: drafts tokens from the text so far. `options`: fields of `Options`."""

    class Options(Section):
        """Options of method `prompt_lookup`; the defaults are Spec-Bench's (evaluation/inference_pld.py)."""

        max_ngram: int = Field(
            3, ge=1, description="length of the longest n-gram that is looked up; shorter ones are tried after it"
        )
        num_tokens: int = Field(10, ge=1, description="most draft tokens per round")
        match: Literal["earliest", "latest"] = Field(
            "earliest", description="which occurrence of the n-gram is used: the tokens after it are drafted"
        )
        partial: bool = Field(
            False, description="also use an occurrence that is followed by fewer than `num_tokens` tokens"
        )

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self._options = self.Options(**options)
        self._ids: list[int] = []
        # From an n-gram to the position after its occurrence, except for n-grams at the end of the text.
        self._after: dict[tuple[int, ...], int] = {}

    @classmethod
    def make(cls, options: Options, setting: DecodingSetting) -> PromptLookup:
        return cls(setting.recipe.name, **options.model_dump())

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        self._ids, self._after = [], {}
        self._append(prompt_ids)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        self._append(committed_ids)

    def propose(self) -> DraftTree:
        num_tokens, continuation = self._options.num_tokens, list[int]()
        for size in range(self._options.max_ngram, 0, -1):
            place = self._after.get(tuple(self._ids[-size:]))
            # Spec-Bench also requires more tokens after the occurrence than the n-gram has.
            needed = 1 if self._options.partial else max(num_tokens, size + 1)
            if place is not None and place + needed <= len(self._ids):
                continuation = self._ids[place : place + num_tokens]
                break
        return DraftTree([self._ids[-1], *continuation], TreeShape.chain(len(continuation)))

    def _append(self, ids: list[int]) -> None:
        for token in ids:
            # The n-grams that ended at the previous token now have a continuation.
            place = len(self._ids)
            for size in range(1, min(self._options.max_ngram, place) + 1):
                ngram = tuple(self._ids[place - size : place])
                if self._options.match == "latest" or ngram not in self._after:
                    self._after[ngram] = place
            self._ids.append(token)


METHOD = PromptLookup
