"""Target sessions with a compiled forward. Prompts are read without compilation.

`CompiledSession`, for CUDA: trees padded to a few sizes, attention over the whole cache. Shapes and addresses are the
same in every round, so that nothing is compiled twice and CUDA graphs apply. What sizes there are is learned from the
methods (`learning`): the largest tree of each. A tree that is larger than any of them runs without compilation, rather
than have something compiled while it is timed.

`DynamicSession`, for a CPU: one graph for every number of nodes and columns.

Shapes: N nodes of a padded tree, S columns that are attended to, F features, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.eval.decoding.session import TargetSession, TargetStep, cached_logits
from draftsmith.eval.trees.device_tree import DeviceTree
from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.models.attention_masks import aligned
from draftsmith.models.compiling import BACKEND, compiled
from draftsmith.models.cpu_kernels import MOST_ROWS
from draftsmith.models.target.features import FINAL_FEATURES, FeatureTap
from draftsmith.models.target.static_tree_cache import StaticTreeCache
from draftsmith.recipes.errors import UserError

logger = logging.getLogger(__name__)


class CompiledSession(TargetSession):
    """See the module's docstring; arguments and errors are those of `TargetSession`.

    Raises:
        UserError: Also in `forward_tree`, if the target cannot be compiled.
    """

    cache_class = StaticTreeCache
    pads = True  # trees, to sizes that are to be learned
    _cache: StaticTreeCache

    def __init__(
        self,
        target: Any,
        max_length_tokens: int,
        feature_layers: tuple[int, ...] = (FINAL_FEATURES,),
        backend: str = BACKEND,
    ) -> None:
        self._wanted_layers, self._backend = feature_layers, backend
        self._sizes = [1]
        self._largest = 1
        self._masks: dict[int, Tensor] = {}
        self._open: dict[int, int] = {}  # columns before it are open in the mask of that size
        self._learns = True
        super().__init__(target, max_length_tokens, feature_layers)
        self._learns = False
        self._forget_graph()

    def read_layers(self, feature_layers: tuple[int, ...]) -> None:
        """Give other features from now on. All that were ever asked for are read; new ones are compiled anew."""
        new = tuple(layer for layer in feature_layers if layer not in self._feature_layers)
        self._wanted_layers = feature_layers
        if new:
            super().read_layers(self._feature_layers + new)
            self._forget_graph()

    @contextmanager
    def learning(self) -> Iterator[None]:
        """In here trees run without compilation; the largest of them is a size from then on."""
        self._learns, self._largest = True, 1
        try:
            yield
        finally:
            self._learns = False
        if self._largest not in self._sizes:
            self._sizes = sorted([*self._sizes, self._largest])
            self._forget_graph()

    def prefill(self, prompt_ids: list[int]) -> TargetStep:
        self._masks.clear()
        self._open.clear()
        return super().prefill(prompt_ids)

    def forward_tree(self, tree: DraftTree) -> TargetStep:
        """Run all nodes at once. Nothing is kept until `commit`."""
        nodes = len(tree)
        self._largest = max(self._largest, nodes)
        if self._learns or nodes > self._sizes[-1]:
            return super().forward_tree(tree)
        size = next(size for size in self._sizes if size >= nodes)
        start = self._cache.committed
        # A padded node is another root to itself: its position is always a valid one.
        ids = tree.tokens + [0] * (size - nodes)
        positions = [start + depth for depth in tree.depths] + [start] * (size - nodes)
        inputs = torch.tensor([ids, positions, range(start, start + size)], device=self.device)
        with torch.inference_mode():
            mask = self._static_mask(tree.shape, size)
            return self._step(inputs[:1], inputs[1:2], inputs[2], mask, nodes)

    def forward_device_tree(self, tree: DeviceTree) -> TargetStep:
        nodes = len(tree)
        self._largest = max(self._largest, nodes)
        if self._learns or nodes > self._sizes[-1]:
            return super().forward_device_tree(tree)
        size = next(size for size in self._sizes if size >= nodes)
        start = self._cache.committed
        with torch.inference_mode():
            ids = F.pad(tree.tokens.clamp_min(0), (0, size - nodes))[None]
            positions = F.pad(tree.depths, (0, size - nodes))[None] + start
            places = self._positions[0, start : start + size].clone()
            mask = self._padded_mask(self._device_bias(tree), size)
            return self._step(ids, positions, places, mask, nodes)

    def _step(self, ids: Tensor, positions: Tensor, places: Tensor, mask: Tensor, nodes: int) -> TargetStep:
        logits, features = self._graph(ids, positions, places, mask)
        # Features wait in the drafter's queue; on CUDA the next forward may reuse their memory.
        features = self._wanted(features.clone() if self.device.type == "cuda" else features)
        return TargetStep(logits[:nodes], features[:nodes])

    def _forward(
        self, token_ids: list[int] | Tensor, positions: Tensor, mask: Tensor | None, **options: Any
    ) -> TargetStep:
        step = super()._forward(token_ids, positions, mask, **options)
        return TargetStep(step.logits, self._wanted(step.features))

    def _wanted(self, features: Tensor) -> Tensor:
        """[N, F] of the layers that the method at work reads, of all that are read."""
        if self._wanted_layers == self._feature_layers:
            return features
        parts = features.chunk(len(self._feature_layers), dim=-1)
        return torch.cat([parts[self._feature_layers.index(layer)] for layer in self._wanted_layers], dim=-1)

    def _static_mask(self, shape: TreeShape, size: int) -> Tensor:
        bias = torch.zeros(len(shape), len(shape), dtype=self._mask.dtype)
        return self._padded_mask(bias.masked_fill_(~shape.attention_mask, torch.finfo(bias.dtype).min), size)

    def _padded_mask(self, bias: Tensor, size: int) -> Tensor:
        """[1, 1, N, S] additive: one buffer for each size, in which every round opens what was committed since.

        bias: of the tree's own nodes among each other, fewer than N perhaps.
        """
        start, dtype = self._cache.committed, self._mask.dtype
        closed = torch.finfo(dtype).min
        mask = self._masks.get(size)
        if mask is None:
            columns = self._cache.view_tokens
            mask = torch.full((1, 1, size, columns), closed, dtype=dtype, device=self.device)
            self._masks[size] = mask
        mask[..., self._open.get(size, 0) : start] = 0
        self._open[size] = start
        padding = size - len(bias)
        block = F.pad(bias, (0, padding, 0, padding), value=closed)
        mask[..., start : start + size] = block.to(self.device)
        return mask

    def _forget_graph(self) -> None:
        """Compile anew from here on."""
        self._cache.view_tokens = aligned(self.max_length_tokens + 1 + self._sizes[-1])
        self._masks.clear()
        self._open.clear()
        name = self._target.config.name_or_path or type(self._target).__name__
        run = _static_forward(self._target, self._cache, self._tap)
        self._graph = compiled(run, self.device, f"target {name}", self._backend)


class DynamicSession(CompiledSession):
    """On a CPU; arguments and errors are those of `TargetSession`.

    A single token is a chain of two to the graph: a size of one would be a graph of its own.

    Args:
        must: Whether a target that cannot be compiled is an error, or runs as it is after a warning.
    """

    pads = False

    def __init__(
        self,
        target: Any,
        max_length_tokens: int,
        feature_layers: tuple[int, ...] = (FINAL_FEATURES,),
        backend: str = BACKEND,
        must: bool = True,
    ) -> None:
        self._must = must
        super().__init__(target, max_length_tokens, feature_layers, backend)

    def forward_tree(self, tree: DraftTree) -> TargetStep:
        """Run all nodes at once. Nothing is kept until `commit`."""
        if self._learns or len(tree) > 1:
            return TargetSession.forward_tree(self, tree)
        step = TargetSession.forward_tree(self, DraftTree([*tree.tokens, 0], _PADDED_TOKEN))
        return TargetStep(step.logits[:1], step.features[:1])

    def forward_device_tree(self, tree: DeviceTree) -> TargetStep:
        if self._learns or len(tree) > 1:
            return TargetSession.forward_device_tree(self, tree)
        return self.forward_tree(DraftTree(tree.tokens.tolist(), TreeShape.chain(0)))

    @torch.inference_mode()
    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, **options: Any) -> TargetStep:
        rows = ids.shape[1]
        if self._learns or mask is None or not 1 < rows <= MOST_ROWS:
            return super()._run(ids, positions, mask, **options)
        start = self._cache.committed
        # Of its own, not a view: what is compiled may depend on where in a larger tensor an input begins.
        places = self._positions[0, start : start + rows].clone()
        try:
            logits, features = self._graph(ids, positions.clone(), places, mask)
        except UserError as error:
            if self._must:
                raise
            logger.warning("%s; going on without", str(error).partition(": use eval.compile")[0])
            self._learns = True
            self._cache.places = None
            self._tap.forget()
            return super()._run(ids, positions, mask, **options)
        return TargetStep(logits[None], features[None])

    def _forget_graph(self) -> None:
        name = self._target.config.name_or_path or type(self._target).__name__
        run = _static_forward(self._target, self._cache, self._tap)
        rows, columns = MOST_ROWS, self._cache.capacity_tokens - 1  # all of them would be another case
        sizes = [(0, 1, rows), (1, 1, rows), (2, 0, rows), (3, 2, rows), (3, 3, columns)]
        self._graph = compiled(run, self.device, f"target {name}", self._backend, sizes)


_PADDED_TOKEN = TreeShape.chain(1)


def open_session(target: Any, max_length_tokens: int, compiles: bool, must: bool = False) -> TargetSession:
    """The session that a target's device is fastest with.

    Args:
        must: Whether a target on a CPU that cannot be compiled is an error.

    Raises:
        UserError: As `TargetSession`.
    """
    if not compiles:
        return TargetSession(target, max_length_tokens)
    if target.device.type == "cuda":
        return CompiledSession(target, max_length_tokens)
    return DynamicSession(target, max_length_tokens, must=must)


def _static_forward(target: Any, cache: StaticTreeCache, tap: FeatureTap) -> Callable[..., tuple[Tensor, Tensor]]:
    """What is compiled: ids and positions [1, N], columns to write [N], mask [1, 1, N, S] to logits and features."""

    def run(ids: Tensor, positions: Tensor, places: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        cache.places, cache.view_tokens = places, mask.shape[-1]
        logits = cached_logits(target, cache, ids, positions, mask)
        cache.places = None
        return logits[0], tap.take()[0]

    return run
