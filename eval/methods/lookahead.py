"""Lookahead decoding (arXiv 2402.02057): Jacobi iterations next to the answer fill a pool of n-grams; no drafter.

One forward a round runs two things, here as one draft tree under the newest token:
* the lookahead branch, W columns of N-1 levels of guesses. Level 0 is a chain below the root, of which column 0 is the
  root itself; the further levels of a column hang off its token in that chain. The target's argmax at the last level
  is the next level, and a column with it an n-gram for the pool; the first level is dropped. At first level 0 has N-2
  more columns, of random tokens of the prompt; each of the first N-2 rounds adds a level and drops a column.
* the verification branch, up to G n-grams of the pool that begin with the newest token.

This is what Spec-Bench runs (its model/lade/decoding.py `jacobi_greedy_search_multilevel`, the masks in
model/lade/models/llama.py), greedily. Where we differ:
* it never accepts the last token of an n-gram, although the target agrees; we do;
* its window already looks ahead while the prompt is read; ours does from the first round on, and does not move in the
  last rounds of an answer, where trees are cut to the remaining tokens;
* we also sample, with the verifier of all other methods.

Two options are ours: put n-grams of the prompt into the pool (`from_prompt`), and let guesses of the window be accepted
(`accept_window`; equal continuations then share their nodes). tau on the embedded target: 1.54 without either, 1.79
with the first, 1.57 with the second, 1.82 with both.

Shapes: W columns, N the n-gram's length ("level"), G guesses, V vocabulary.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

from pydantic import Field
from torch import Tensor

from draftsmith.eval.decoding.method import Method
from draftsmith.eval.methods.registry import DecodingSetting
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.kernels.cpu_kernels import largest
from draftsmith.recipes.schema import Section


class Lookahead(Method):
    """Method `lookahead` of a recipe: Lookahead decoding (arXiv 2402.02057). `options`: fields of `Options`."""

    drafts_trees = True

    class Options(Section):
        """Options of method `lookahead`; the defaults are Spec-Bench's (its eval.sh)."""

        level: int = Field(5, ge=2, description="N, the number of tokens in each n-gram")
        window: int = Field(7, ge=1, description="W, the number of n-grams that are guessed in parallel")
        guesses: int = Field(
            7,
            ge=1,
            description="G: most n-grams that the pool keeps for each first token, and that a round verifies",
        )
        from_prompt: bool = Field(False, description="start with the prompt's n-grams in the pool; not in the paper")
        accept_window: bool = Field(
            False, description="allow guesses of the lookahead branch to be accepted too; not in the paper"
        )

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self._options = self.Options(**options)
        self._level = self._options.level
        # N-1 levels of W guesses; the first guess stands for the newest token and is not read.
        self._levels: list[list[int]] = []
        # Pool: from a token to the continuations (N-1 tokens each) that followed it, the most recent last.
        self._pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self._last_nodes: list[int] = []  # last node of each column
        self._proposed = 0

    @classmethod
    def make(cls, options: Options, setting: DecodingSetting) -> Lookahead:
        return cls(setting.recipe.name, **options.model_dump())

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        guess = random.Random(0)
        self._levels = [[guess.choice(prompt_ids) for _ in range(self._options.window + self._level - 2)]]
        self._pool = {}
        if self._options.from_prompt:
            for begin in range(len(prompt_ids) - self._level + 1):
                self._remember(prompt_ids[begin : begin + self._level])

    def propose(self) -> DraftTree:
        tokens, parents = [self._newest], [-1]
        children: dict[tuple[int, int], int] = {}

        def add(parent: int, token: int) -> int:
            node = children.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
            return node

        for guess in self._pool.get(self._newest, ()):
            node = 0
            for token in guess:
                node = add(node, token)
        num_candidates = None
        if not self._options.accept_window:
            num_candidates = len(tokens)
            children.clear()
        column = 0
        self._last_nodes = []
        for index in range(len(self._levels[0])):
            column = add(column, self._levels[0][index]) if index > 0 else 0
            node = column
            for level in self._levels[1:]:
                node = add(node, level[index])
            self._last_nodes.append(node)
        self._proposed = len(tokens)
        return DraftTree(tokens, TreeShape.of(tuple(parents), num_candidates))

    def read_logits(self, tree: DraftTree, logits: Tensor) -> None:
        """Append the target's likeliest tokens as the window's next level, and add each column's n-gram to the pool."""
        if len(tree) < self._proposed:
            return  # cut, at the end of the answer
        following = largest(logits[self._last_nodes]).tolist()
        if len(self._levels) < self._level - 1:
            self._levels = [level[1:] for level in [*self._levels, following]]
            return
        for index, token in enumerate(following):
            first = self._newest if index == 0 else self._levels[0][index]
            self._remember([first, *(level[index] for level in self._levels[1:]), token])
        self._levels = [*self._levels[1:], following]

    def _remember(self, ngram: list[int]) -> None:
        known = self._pool.setdefault(ngram[0], OrderedDict())
        continuation = tuple(ngram[1:])
        known[continuation] = None
        known.move_to_end(continuation)
        if len(known) > self._options.guesses:
            known.popitem(last=False)


METHOD = Lookahead
