"""A target's forward, compiled.

On a CPU one graph serves every number of nodes and columns. On CUDA shapes and addresses are the same in every round,
so that CUDA graphs apply: trees are padded to a few sizes, and attend to the whole cache, of which the mask hides what
is not there.

Shapes: N nodes of padded trees, S columns that are attended to, F features, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.models.compiling import BACKEND, compiled, padded_rows
from draftsmith.models.cpu_kernels import MOST_ROWS
from draftsmith.models.decoding.cached_model import CachedModel


@dataclass(frozen=True)
class Compiler:
    """How forwards are compiled.

    backend: of `torch.compile`. must: whether a target that cannot be compiled is an error, or runs as it is after a
    warning. is_static: whether trees are padded to a few sizes, over the whole cache; None: on CUDA.
    """

    backend: Any = BACKEND
    must: bool = True
    is_static: bool | None = None


class CompiledForward:
    """The compiled form of `CachedModel.run`. Prompts are read without compilation."""

    def __init__(self, model: CachedModel, compiler: Compiler) -> None:
        self._model, self._backend, self.must = model, compiler.backend, compiler.must
        self._device = model.model.device
        self.is_static = self._device.type == "cuda" if compiler.is_static is None else compiler.is_static
        self.sizes = [1]  # of padded trees
        self._grows = True
        self.forget_graph()

    def keep_sizes(self) -> None:
        """Run trees larger than any so far without compilation from now on, as it would be timed with them."""
        self._grows = False

    def size_of(self, num_rows: int) -> int:
        """Return the number of rows that such trees are padded to; 0: they run without compilation."""
        if not self.is_static:
            # A single token has a tree of two: a size of one would be a separate graph.
            return max(2, num_rows) if num_rows <= MOST_ROWS else 0
        known = next((size for size in self.sizes if size >= num_rows), 0)
        if not known and self._grows:
            known = padded_rows(num_rows)
            self.sizes = sorted([*self.sizes, known])
        return known

    def run(
        self, ids: Tensor, positions: Tensor, places: int | Tensor, columns: int, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run as `CachedModel.run` does.

        Raises:
            UserError: The target cannot be compiled.
        """
        if not isinstance(places, Tensor):
            places = self._model.cache.columns(0, self._device)[places : places + len(ids)]
        # Copies, not views: what is compiled may depend on where in a larger tensor an input begins.
        inputs = [part.clone() for part in (ids[None], positions[None], places)]
        logits, features = self._graph(*inputs, mask)
        # Features wait in the drafter's queue; on CUDA the next forward may reuse their memory.
        return logits, features.clone() if self._device.type == "cuda" else features

    def forget_graph(self) -> None:
        """Compile from scratch at the next forward."""
        model, cache, tap = self._model, self._model.cache, self._model.tap

        def run(ids: Tensor, positions: Tensor, places: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            """Return logits [N, V] and features [N, F]; ids and positions [1, N], places [N], mask [1, 1, N, S]."""
            cache.write_at(places, mask.shape[-1])
            logits = model.logits(ids, positions, mask)
            cache.write_at(0, 0)
            return logits[0], tap.take()[0]

        rows, columns = MOST_ROWS, cache.capacity - 1  # all of them would be another case
        sizes = [(0, 1, rows), (1, 1, rows), (2, 0, rows), (3, 2, rows), (3, 3, columns)]
        name = f"target {model.model.config.name_or_path or type(model.model).__name__}"
        self._graph = compiled(run, self._device, name, self._backend, None if self.is_static else sizes)
