"""A drafter, trained or fitted, and the trees that are made of what it drafts.

Shapes: P prompt, n newly committed tokens, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.eval.trees.builders import TreeBuilder
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.models.decoding.protocols import SequenceDecoder, StepwiseDecoder


class DrafterMethod:
    """See the module's docstring.

    Args:
        name: The row of the table.
        decoder: The drafter at work on a sequence.
        builder: The tree's form, for a decoder of this kind (see `builders.tree_builder`).
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
        self.name, self.sequential = name, isinstance(decoder, StepwiseDecoder)
        self.columns = decoder.columns
        self.decoder, self._builder, self._sampling, self._generator = decoder, builder, sampling, generator
        self._newest = -1

    def with_decoder(self, decoder: SequenceDecoder) -> DrafterMethod:
        """The same method over another decoder of the same kind."""
        return DrafterMethod(self.name, decoder, self._builder, self._sampling, self._generator)

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        self.decoder.start(torch.tensor(prompt_ids, device=features.device), features)

    def propose(self) -> DraftTree:
        return self._builder.propose(self._newest, self.decoder, self._sampling, self._generator)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        self._newest = committed_ids[-1]
        self.decoder.observe(torch.tensor(committed_ids, device=features.device), features)
