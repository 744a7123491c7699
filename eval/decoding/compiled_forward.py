"""A target's forward, compiled.

On a CPU one graph serves every number of nodes and columns. On CUDA shapes and addresses are the same in every round,
so that CUDA graphs apply: trees are padded to a few sizes, and attend to the whole cache, of which the mask hides what
is not there; `cuda_attention.py` does not read hidden columns. The numbers of a tree reach the device in one copy.

In 16-bit floats kernels for one row and for eight give different bits, and nearly equal logits change places. If every
forward has the same number of rows, a row has the same bits in a plain step and in a draft tree.

Shapes: N nodes of padded trees, S columns that are attended to, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.trees.verify import BITS, DraftTree, TreeShape
from draftsmith.models.compiling import BACKEND, StaticCall, compiled, padded_rows
from draftsmith.models.decoding.cached_model import CachedModel
from draftsmith.models.decoding.decoders import LONGEST_TREE_NODES
from draftsmith.models.decoding.kv_cache import aligned, write_numbers
from draftsmith.models.kernels.cpu_kernels import MOST_ROWS
from draftsmith.models.kernels.fused_projections import fuse_projections


@dataclass(frozen=True)
class Compiler:
    """How forwards are compiled.

    backend: of `torch.compile`. must: whether a target that cannot be compiled is an error, or runs as it is after a
    warning. is_static: whether trees are padded to a few sizes, over the whole cache; None: on CUDA. same_size: whether
    they are padded to one size, plain steps too; None: on CUDA in 16-bit floats.
    """

    backend: Any = BACKEND
    must: bool = True
    is_static: bool | None = None
    same_size: bool | None = None


class CompiledForward:
    """The compiled form of `CachedModel.run`. Prompts are read without compilation."""

    def __init__(self, model: CachedModel, compiler: Compiler) -> None:
        self._model, self._backend, self.must = model, compiler.backend, compiler.must
        self._device = model.model.device
        on_cuda = self._device.type == "cuda"
        self.is_static = on_cuda if compiler.is_static is None else compiler.is_static
        has_16_bits = model.model.dtype in (torch.float16, torch.bfloat16)
        same_size = on_cuda and has_16_bits if compiler.same_size is None else compiler.same_size
        self.same_size = self.is_static and same_size
        self.sizes = [aligned(1) if self.same_size else 1]  # of padded trees
        self._grows = True
        self.forget_graph()

    def keep_sizes(self) -> None:
        """Run trees larger than any so far without compilation from now on, as it would be timed with them."""
        self._grows = False

    def size_of(self, num_rows: int) -> int:
        """Return the number of rows that such trees are padded to; 0: they run without compilation.

        With `same_size` it is that of the largest tree so far, known once every method has answered a question.
        """
        if not self.is_static:
            # A single token has a tree of two: a size of one would be a separate graph.
            return max(2, num_rows) if num_rows <= MOST_ROWS else 0
        known = next((size for size in self.sizes if size >= num_rows), 0)
        if not known and self._grows:
            # Sequences come and go: few sizes, as each is compiled.
            one_sequence = self.same_size and self._model.cache.sequences == 1
            known = aligned(num_rows) if one_sequence else padded_rows(num_rows)
            # The cache has room for the largest tree with its root, and for no padding after it.
            known = max(num_rows, min(known, LONGEST_TREE_NODES + 1))
            self.sizes = [known] if self.same_size else sorted([*self.sizes, known])
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
        inputs = [ids[None], positions[None], places, mask]
        if not self.is_static:
            return self._dynamic(*(part.clone() for part in inputs[:3]), mask)
        call = self._static_call(self._forward, False, len(ids), lambda: [part.clone() for part in inputs])
        for held, given in zip(call.inputs, inputs, strict=True):
            held.copy_(given)
        return self._kept(call)

    def run_tree(self, tree: DraftTree, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Run a tree, padded to at most `BITS` nodes, after `length` tokens; logits [N, V] and features [N, F].

        Raises:
            UserError: The target cannot be compiled.
        """
        drafted, shape = tree.drafted, TreeShape.of((*tree.parents, *[0] * (size - len(tree))))
        tokens = [*tree.tokens, *[0] * (size - len(tree.tokens))]
        call = self._static_call(self._tree_forward, True, size, lambda: [self._numbers(size)])
        write_numbers(call.inputs[0], [tokens, shape.depths, shape.ancestor_bits, [length] * size])
        if drafted is not None:
            call.inputs[0][0, 1 : 1 + len(drafted)].copy_(drafted)
        return self._kept(call)

    def _numbers(self, size: int) -> Tensor:
        return torch.zeros(4, size, dtype=torch.int64, device=self._device)

    def _static_call(
        self, function: Callable[..., Any], is_tree: bool, size: int, inputs: Callable[[], list[Tensor]]
    ) -> StaticCall:
        call = self._static_calls.get((is_tree, size))
        if call is None:
            call = StaticCall(function, inputs(), self._name, self._backend)
            self._static_calls[is_tree, size] = call
        return call

    def _kept(self, call: StaticCall) -> tuple[Tensor, Tensor]:
        """Return logits, which are read before the next forward, and a copy of features, which drafters keep."""
        logits, features = call()
        return logits, features.clone()

    def forget_graph(self) -> None:
        """Compile from scratch at the next forward."""
        model, cache, tap, device = self._model, self._model.cache, self._model.tap, self._device
        dtype = model.model.dtype
        if self.is_static:
            fuse_projections(model.model)

        def run(ids: Tensor, positions: Tensor, places: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            """Return logits [N, V] and features [N, F]; ids and positions [1, N], places [N], mask [1, 1, N, S]."""
            cache.write_at(places, mask.shape[-1])
            logits = model.logits(ids, positions, mask)
            cache.write_at(0, 0)
            return logits[0], tap.take()[0]

        def run_tree(numbers: Tensor) -> tuple[Tensor, Tensor]:
            """Return the same of a tree's tokens, depths and ancestors and the committed tokens, [4, N]."""
            ids, depths, ancestors, lengths = numbers.unbind()
            # The node at a column: negative for committed tokens, which every node sees.
            node_ns = torch.arange(cache.capacity, device=device) - lengths[:, None]
            is_ancestor = ancestors[:, None].bitwise_right_shift(node_ns.clamp(0, BITS - 1)) & 1 == 1
            sees_ns = (node_ns < 0) | ((node_ns < BITS) & is_ancestor)
            mask = torch.zeros(sees_ns.shape, dtype=dtype, device=device).masked_fill(~sees_ns, torch.finfo(dtype).min)
            places = lengths + torch.arange(len(lengths), device=device)
            return run(ids[None], (lengths + depths)[None], places, mask[None, None])

        rows, columns = MOST_ROWS, cache.capacity - 1  # all of them would be another case
        sizes = [(0, 1, rows), (1, 1, rows), (2, 0, rows), (3, 2, rows), (3, 3, columns)]
        self._name = f"target {model.model.config.name_or_path or type(model.model).__name__}"
        self._forward, self._tree_forward = run, run_tree
        self._dynamic = compiled(run, self._name, sizes, self._backend)
        self._static_calls: dict[tuple[bool, int], StaticCall] = {}
