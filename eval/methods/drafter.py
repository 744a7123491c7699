"""A drafter, trained or fitted, and the trees that are made of what it drafts.

Shapes: P prompt, n newly committed tokens, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.eval.trees.adaptive import AdaptiveTree
from draftsmith.eval.trees.builders import TreeBuilder, tree_builder
from draftsmith.eval.trees.path_lookup import PathLookup, with_lookups
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.eval.trees.verify import Sampling
from draftsmith.models.decoding.decoders import ALL_TOKENS, OneForward, ReadsTokens, SequenceDecoder, StepwiseDecoder
from draftsmith.models.decoding.kv_cache import to_device
from draftsmith.recipes.schema import MethodRecipe


def drafter_method(
    recipe: MethodRecipe, decoder: SequenceDecoder, sampling: Sampling, generator: torch.Generator | None = None
) -> DrafterMethod:
    """A drafter's method with the tree that a recipe asks for.

    Raises:
        UserError: The static paths are no tree.
    """
    adaptive = AdaptiveTree() if recipe.tree == "adaptive" else None
    builder = tree_builder(recipe, decoder, adaptive)
    lookup_nodes = recipe.nodes if recipe.lookup else 0
    return DrafterMethod(recipe.name, decoder, builder, sampling, generator, lookup_nodes, adaptive)


class DrafterMethod:
    """See the module's docstring.

    Args:
        name: The row of the table.
        decoder: The drafter's.
        builder: The tree's form, for a decoder of this kind (see `builders.tree_builder`).
        sampling: the target's, applied to q too.
        generator: for sampled trees.
        lookup_nodes: The places of a best-first tree for which paths that lookups continue compete; 0: no lookups.
        adaptive: What cuts best-first trees to the size that pays; None: they stay whole.
    """

    def __init__(
        self,
        name: str,
        decoder: SequenceDecoder,
        builder: TreeBuilder,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        lookup_nodes: int = 0,
        adaptive: AdaptiveTree | None = None,
    ) -> None:
        self.name = name
        self.sequential = isinstance(decoder, StepwiseDecoder) and not isinstance(decoder, OneForward)
        # A lookup finds any token.
        self.columns = ALL_TOKENS if lookup_nodes else decoder.columns
        self._lookup, self._lookup_nodes = PathLookup(sampling.temperature) if lookup_nodes else None, lookup_nodes
        self.adaptive = adaptive
        self.decoder, self._builder, self._sampling, self._generator = decoder, builder, sampling, generator
        self._newest, self._on_host = -1, isinstance(decoder, ReadsTokens)

    def with_decoder(self, decoder: SequenceDecoder) -> DrafterMethod:
        """The same method over another decoder of the same kind."""
        settings = (self._builder, self._sampling, self._generator, self._lookup_nodes, self.adaptive)
        return DrafterMethod(self.name, decoder, *settings)

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        if self._lookup is not None:
            self._lookup.start(prompt_ids)
        self.decoder.start(self._tensor(prompt_ids, features), features)

    def propose(self) -> DraftTree:
        tree = self._builder.propose(self._newest, self.decoder, self._sampling, self._generator)
        if self._lookup is not None:
            tree = with_lookups(tree, self._lookup, self._lookup_nodes)
        return tree if self.adaptive is None else self.adaptive.fitting(tree)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        self._newest = committed_ids[-1]
        if self._lookup is not None:
            self._lookup.observe(committed_ids)
        if self.adaptive is not None:
            self.adaptive.observe(committed_ids)
        self.decoder.observe(self._tensor(committed_ids, features), features)

    def _tensor(self, ids: list[int], features: Tensor) -> Tensor:
        return to_device(ids, torch.device("cpu") if self._on_host else features.device)
