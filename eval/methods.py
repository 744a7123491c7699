"""Ways of proposing tokens, behind three calls. The verification loop does not know which one it runs.

Shapes: P prompt, n newly committed tokens, F features (those of the session's layers, one after the other).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftsmith.eval.sampling import Sampling
from draftsmith.eval.tree import DraftTree, root_only
from draftsmith.eval.tree_builders import TreeBuilder
from draftsmith.models.drafter import SequenceDecoder

AUTOREGRESSIVE = "autoregressive"


class Method(Protocol):
    """How a round's draft tree comes about.

    start: a new sequence; features [P, F] are the target's *at* the prompt's tokens.
    propose: the tree under the newest committed token.
    observe: tokens were committed; features [n, F] are the target's that *predicted* them, at the token before each.
    """

    name: str

    def start(self, prompt_ids: list[int], features: Tensor) -> None: ...

    def propose(self) -> DraftTree: ...

    def observe(self, committed_ids: list[int], features: Tensor) -> None: ...


class Autoregressive:
    """Proposes nothing: the same loop becomes the baseline that every speedup is measured against."""

    name = AUTOREGRESSIVE

    def __init__(self) -> None:
        self._newest = -1

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        pass

    def propose(self) -> DraftTree:
        return root_only(self._newest)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        self._newest = committed_ids[-1]


class DrafterMethod:
    """A trained drafter and the trees that are made of what it drafts.

    Args:
        name: The row of the table.
        decoder: The drafter at work on a sequence.
        builder: The tree's form, for a decoder of this kind (see `tree_builders.tree_builder`).
        sampling: the target's, applied to q too.
        generator: for sampled trees.
    """

    def __init__(
        self,
        name: str,
        decoder: SequenceDecoder,
        builder: TreeBuilder,
        sampling: Sampling,
        generator: torch.Generator | None = None,
    ) -> None:
        self.name = name
        self._decoder, self._builder, self._sampling, self._generator = decoder, builder, sampling, generator
        self._newest = -1

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        self._decoder.start(torch.tensor(prompt_ids, device=features.device), features)

    def propose(self) -> DraftTree:
        return self._builder.propose(self._newest, self._decoder, self._sampling, self._generator)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        self._newest = committed_ids[-1]
        self._decoder.observe(torch.tensor(committed_ids, device=features.device), features)
