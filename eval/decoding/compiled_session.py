"""A target session with a compiled forward. Prompts are read without compilation.

On a CPU one graph serves every number of nodes and columns. On CUDA shapes and addresses are the same in every round,
so that CUDA graphs apply: trees are padded to a few sizes, and attend to the whole cache, of which the mask hides what
is not there.

Shapes: N nodes of a padded tree, S columns that are attended to, F features, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.decoding.session import TargetSession, TargetStep, cached_logits
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.compiling import BACKEND, compiled, compiles_by_default
from draftsmith.models.cpu_kernels import MOST_ROWS, has_kernels
from draftsmith.models.cpu_layers import FAMILIES
from draftsmith.models.target.features import FINAL_FEATURES
from draftsmith.models.target.windows import Masks

logger = logging.getLogger(__name__)


def open_session(target: Any, max_length_tokens: int, compiles: bool | None) -> TargetSession:
    """The session that `eval.compile` asks for.

    Args:
        compiles: True: a target that cannot be compiled is an error; None: it is compiled where the machine has what
            that takes, and runs as it is, after a warning, if it cannot be.

    Raises:
        UserError: As `TargetSession`.
    """
    session = TargetSession(target, max_length_tokens)
    if session.runs_in_one_call:
        return session
    is_compiled = compiles or (compiles is None and compiles_by_default(target.device))
    if target.device.type == "cpu" and has_kernels():
        logger.warning(
            "%s has other layers than %s, which run in one call on a CPU: a step takes longer%s",
            type(target).__name__,
            ", ".join(FAMILIES.values()),
            ", and compiling it takes up to a minute the first time" if is_compiled else "",
        )
    if is_compiled:
        session.close()
        return CompiledSession(target, max_length_tokens, must=bool(compiles))
    return session


class CompiledSession(TargetSession):
    """See the module's docstring; arguments and errors are those of `TargetSession`.

    Args:
        backend: Of `torch.compile`.
        must: Whether a target that cannot be compiled is an error, or runs as it is after a warning.
        static: Whether trees are padded to a few sizes, over the whole cache; None: on CUDA.

    Raises:
        UserError: Also in `forward_tree`, if the target cannot be compiled.
    """

    _static_cache = True

    def __init__(
        self,
        target: Any,
        max_length_tokens: int,
        feature_layers: tuple[int, ...] = (FINAL_FEATURES,),
        backend: str = BACKEND,
        must: bool = True,
        static: bool | None = None,
    ) -> None:
        self._wanted_layers, self._backend, self._must = feature_layers, backend, must
        self._static = target.device.type == "cuda" if static is None else static
        self.sizes = [1]  # of padded trees
        self._compiles, self._grows = False, True
        self._size = 0  # of the tree that is run; 0: without compilation
        super().__init__(target, max_length_tokens, feature_layers)
        self._compiles = not self.runs_in_one_call
        self._forget_graph()

    def read_layers(self, feature_layers: tuple[int, ...]) -> None:
        """Give other features from now on. All that were ever asked for are read; new ones are compiled anew."""
        new = tuple(layer for layer in feature_layers if layer not in self._feature_layers)
        self._wanted_layers = feature_layers
        if new:
            super().read_layers(self._feature_layers + new)
            self._forget_graph()

    def keep_sizes(self) -> None:
        """Run trees larger than any so far without compilation from now on, as it would be timed with them."""
        self._grows = False

    def forward_tree(self, tree: DraftTree) -> TargetStep:
        """Run all nodes in one forward. Nothing is kept until `commit`."""
        nodes = len(tree)
        # Beyond a window there is a mask for each type of layer, which no graph was made for.
        within = not self._windows.reached(self._cache.committed + nodes)
        self._size = self._size_of(nodes) if self._compiles and within else 0
        padding = max(0, self._size - nodes)
        if padding:
            shape = TreeShape.of((*tree.parents, *[0] * padding))
            tree = DraftTree([*tree.tokens, *[0] * padding], shape)
        step = super().forward_tree(tree)
        return TargetStep(step.logits[:nodes], step.features[:nodes])

    def _size_of(self, nodes: int) -> int:
        if not self._static:
            # A single token has a tree of two: a size of one would be a graph of its own.
            return max(2, nodes) if nodes <= MOST_ROWS else 0
        known = next((size for size in self.sizes if size >= nodes), 0)
        if not known and self._grows:
            known = 1 << (nodes - 1).bit_length()
            self.sizes = sorted([*self.sizes, known])
        return known

    def _columns_of(self, end: int) -> int:
        return self._cache.capacity_tokens if self._static and self._size else end

    @torch.inference_mode()
    def _run(self, ids: Tensor, positions: Tensor, mask: Masks | None, **options: Any) -> TargetStep:
        if not isinstance(mask, Tensor) or not self._size:
            return self._run_as_it_is(ids, positions, mask, **options)
        # Of their own, not views: what is compiled may depend on where in a larger tensor an input begins.
        inputs = [part.clone() for part in (ids, positions, self._places_of(ids.shape[1]))]
        try:
            logits, features = self._graph(*inputs, mask)
        except UserError as error:
            if self._must:
                raise
            logger.warning("%s; going on without", str(error).partition(": use eval.compile")[0])
            self._compiles, self._cache.places = False, None
            self._tap.forget()
            return self._run_as_it_is(ids, positions, mask, **options)
        # Features wait in the drafter's queue; on CUDA the next forward may reuse their memory.
        features = features.clone() if self.device.type == "cuda" else features
        return TargetStep(logits[None], self._wanted(features[None]))

    def _tree_in_one_call(self, tree: DraftTree, positions: list[int]) -> TargetStep:
        step = super()._tree_in_one_call(tree, positions)
        return TargetStep(step.logits, self._wanted(step.features))

    def _places_of(self, rows: int) -> Tensor:
        """[N] the columns that this many rows are written to."""
        start = self._cache.committed
        return self._positions[0, start : start + rows]

    def _run_as_it_is(self, ids: Tensor, positions: Tensor, mask: Masks | None, **options: Any) -> TargetStep:
        """Run without compilation."""
        if isinstance(mask, Tensor):  # which may be that of a compiled forward, over the whole cache
            mask = mask[..., : self._cache.committed + ids.shape[1]]
        step = super()._run(ids, positions, mask, **options)
        return TargetStep(step.logits, self._wanted(step.features))

    def _wanted(self, features: Tensor) -> Tensor:
        """[..., F] of the layers that the method reads, of all that are read."""
        if self._wanted_layers == self._feature_layers:
            return features
        parts = features.chunk(len(self._feature_layers), dim=-1)
        return torch.cat([parts[self._feature_layers.index(layer)] for layer in self._wanted_layers], dim=-1)

    def _forget_graph(self) -> None:
        """Compile anew from here on."""
        target, cache, tap = self._target, self._cache, self._tap

        def run(ids: Tensor, positions: Tensor, places: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            """[N, V] and [N, F], of ids and positions [1, N], the columns to write [N], and the mask [1, 1, N, S]."""
            cache.places, cache.view_tokens = places, mask.shape[-1]
            logits = cached_logits(target, cache, ids, positions, mask)
            cache.places = None
            return logits[0], tap.take()[0]

        rows, columns = MOST_ROWS, cache.capacity_tokens - 1  # all of them would be another case
        sizes = [(0, 1, rows), (1, 1, rows), (2, 0, rows), (3, 2, rows), (3, 3, columns)]
        name = f"target {target.config.name_or_path or type(target).__name__}"
        self._graph = compiled(run, self.device, name, self._backend, None if self._static else sizes)
