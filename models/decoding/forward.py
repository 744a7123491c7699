"""A causal language model with its KV cache: the forward of a prompt, and of the nodes of a draft tree.

How a forward of nodes runs is chosen when it is made:

* in one call on a CPU, if `CpuTarget` has the model's layers;
* compiled (`Compiler`), on CUDA. Shapes and addresses are the same in every round, so that graphs are recorded: trees
  are padded to a few sizes, and rows attend to the whole cache, of which a mask hides what they do not see;
  `cuda_attention.py` does not read hidden columns;
* else by the model's own, uncompiled forward.

In 16-bit floats kernels for one row and for eight give different bits, and nearly equal logits change places. If every
forward has the same number of rows, a row has the same bits in a plain step and in a draft tree.

Shapes: N rows of a forward, M nodes of a tree, S columns of the cache, L layers, G key-value heads, D head size, F
features, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftsmith.errors import UserError
from draftsmith.models.compiling import BACKEND, Graphs, padded_rows
from draftsmith.models.decoding.kv_cache import (
    LONGEST_TREE_NODES,
    KVCache,
    additive_mask,
    aligned,
    for_device,
    hidden_columns,
    seen_nodes,
    to_device,
)
from draftsmith.models.decoding.recurrent import ChainStates, cache_layers
from draftsmith.models.kernels.cpu_layers import MOST_CALL_ROWS, CpuTarget
from draftsmith.models.kernels.fused_projections import fuse_projections
from draftsmith.models.target.features import FeatureTap
from draftsmith.models.target.windows import Masks, get_windows, has_recurrent_layers


@dataclass(frozen=True)
class Compiler:
    """Settings by which a `Forward` is compiled.

    backend: of `torch.compile`. must: whether a model that cannot be compiled is an error; if not, it runs uncompiled
    after a warning. same_size: whether trees and plain steps are padded to one size; None: on CUDA in 16-bit floats.
    """

    backend: Any = BACKEND
    must: bool = True
    same_size: bool | None = None


class Forward:
    """Forwards of a causal language model over a KV cache: of prompts, and of the nodes of draft trees.

    Args:
        model: A model in eval mode that takes a 4-D attention mask and a transformers `Cache`.
        feature_layers: Layers whose hidden states are returned, see `FeatureTap`.
        compiler: Settings to compile forwards of nodes, unless they run in one C++ call; None: they stay uncompiled.
    """

    def __init__(
        self, model: Any, cache: KVCache, feature_layers: tuple[int, ...] = (), compiler: Compiler | None = None
    ) -> None:
        self.model, self.cache, self.device = model, cache, model.device
        self._wanted = self._read = feature_layers
        self._tap, self._windows = FeatureTap(model, feature_layers), get_windows(model)
        self._column_s = torch.arange(cache.capacity, device=self.device)
        self.cpu_target = CpuTarget.of(model, cache.capacity)
        if self.cpu_target is not None:
            self.cpu_target.allocate(cache)
        self.compiler, self._grows = None if self.cpu_target is not None else compiler, True
        is_compiled = compiler is not None
        layers = cache_layers(model, 1, lambda number, count: TreeCacheLayer(cache, number, count, is_compiled))
        self.states = ChainStates(layers) if has_recurrent_layers(model) else None
        self._layers = Cache(layers=layers)
        takes = inspect.signature(model.forward).parameters
        self._last_logits: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        if self.compiler is not None:
            on_cuda, has_16_bits = self.device.type == "cuda", model.dtype in (torch.float16, torch.bfloat16)
            same_size = self.compiler.same_size
            self.same_size = on_cuda and has_16_bits if same_size is None else same_size
            self.sizes = [aligned(1) if self.same_size else 1]  # of padded trees
            self._compile()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._tap.close()

    def read_layers(self, feature_layers: tuple[int, ...]) -> None:
        """Set the layers whose hidden states later forwards return.

        A compiled forward reads all layers requested so far; it is compiled from scratch if new ones are requested.
        """
        self._wanted, read = feature_layers, feature_layers
        if self.compiler is not None:
            read = (*self._read, *(layer for layer in feature_layers if layer not in self._read))
        if read != self._read:
            self._tap.close()
            self._read, self._tap = read, FeatureTap(self.model, read)
            if self.compiler is not None:
                self._compile()

    def _features(self, features: Tensor) -> Tensor:
        """Return the features [N, F] of the requested layers, of all that are read."""
        if self._wanted == self._read:
            return features
        parts = features.chunk(len(self._read), dim=-1)
        return torch.cat([parts[self._read.index(layer)] for layer in self._wanted], dim=-1)

    # ---- prompts ----

    def read_prompt(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Start a new sequence with its prompt; return the last token's logits [1, V], and features [N, F]."""
        self.cache.length = 0
        if self.states is not None:
            self.states.reset()
        if self.cpu_target is not None:
            self.cpu_target.refresh()
        if self._is_one_call(1, len(tokens)):
            parts, logits = list[Tensor](), torch.empty(0)
            for first in range(0, len(tokens), MOST_CALL_ROWS):
                rows = range(first, min(first + MOST_CALL_ROWS, len(tokens)))
                skipped = len(rows) - (rows.stop == len(tokens))
                logits, part = self._call(tokens[first : rows.stop], rows, first, first_kept=skipped)
                parts.append(part)
            features = torch.cat(parts)
        else:
            self.cache.write_at(0, 0)
            ids = to_device(tokens, self.device)
            logits = self._logits(ids, self._column_s[: len(tokens)], None, **self._last_logits)[-1:]
            features = self._tap.take()[0]
        self.cache.length = len(tokens)
        return logits, self._features(features)

    # ---- nodes of a tree, after the committed tokens ----

    def __call__(
        self, tokens: Sequence[int], parents: tuple[int, ...], depths: Sequence[int], drafted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the last N nodes of a tree; return logits [N, V], valid until the next forward, and features [N, F].

        Args:
            tokens: [N] token ids, or only the first of them: the others are given as `drafted`.
            parents: [M] parent of each node, see `seen_nodes`; the first M - N nodes ran before.
            depths: [N] depth of each node: its position, counted from the end of the committed tokens.
            drafted: The other token ids, a tensor on the device, so that the host need not wait for them.

        Raises:
            UserError: The tree is too large, or the model cannot be compiled and `Compiler.must` is set.
        """
        num_rows, length = len(depths), self.cache.length
        first, end = length + len(parents) - num_rows, length + len(parents)
        if end > self.cache.capacity:
            raise UserError(
                f"a draft tree of {len(parents) - 1} draft tokens is too large: use at most {LONGEST_TREE_NODES}"
            )
        slides = self._windows.reached(end)
        if self._is_one_call(num_rows, end):
            logits, features = self._call(tokens, [length + depth for depth in depths], first, parents=parents)
            return logits, self._features(features)
        # Beyond a sliding window each type of layer has its own mask, for which nothing was compiled.
        size = 0 if self.compiler is None or slides or not self._graphs.works else self._size_of(num_rows)
        width = size or len(parents)
        numbers = torch.zeros(num_rows, 2 + width, dtype=torch.int64)
        numbers[:, 0], numbers[:, 1] = torch.tensor(depths) + length, length
        numbers[:, 2 : 2 + len(parents)] = seen_nodes(parents, num_rows)
        if size:
            return self._run_compiled(tokens, drafted, numbers, size)
        ids, numbers = to_device(list(tokens), self.device), to_device(numbers, self.device)
        if drafted is not None:
            ids = torch.cat([ids, drafted])
        self.cache.write_at(first, end)
        mask: Masks | None = None
        # One token looks at the whole cache: without a mask the fastest attention kernels apply. Beyond a window
        # transformers makes a mask itself.
        if num_rows > 1 or depths[0] < len(parents) - 1:
            mask = self._mask(numbers, length, end)
            if slides:
                key_s = torch.cat([self._column_s[:length], numbers[:, 0]])  # their positions
                mask = self._windows.masks(mask, numbers[:, 0], key_s)
        logits = self._logits(ids, numbers[:, 0], mask)
        features = self._tap.take()[0] if self._read else logits[:, :0]
        return logits, self._features(features)

    def run_chain(self, tokens: Sequence[int], first: int) -> tuple[Tensor, Tensor]:
        """Run a chain of tokens from position `first` on, each of which sees all before it; return as `__call__`."""
        end = first + len(tokens)
        self.cache.write_at(first, end)
        logits = self._logits(to_device(tokens, self.device), self._column_s[first:end], None)
        return logits, self._features(self._tap.take()[0])

    def _is_one_call(self, num_rows: int, end: int) -> bool:
        """Return True if rows up to this column are one call; beyond a window, if all layers have the same one."""
        if self.cpu_target is None or num_rows > MOST_CALL_ROWS:
            return False
        return self._windows.shared is not None or not self._windows.reached(end)

    def _call(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        first: int,
        parents: Sequence[int] | None = None,
        first_kept: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Run rows as `CpuTarget.forward` does; logits [N - first_kept, V] and features [N, F] of all read layers."""
        assert self.cpu_target is not None
        return self.cpu_target.forward(
            tokens, positions, self.cache.keys, self.cache.values, first, self._read, parents, self._windows.shared,
            first_kept,
        )  # fmt: skip

    def _logits(self, ids: Tensor, positions: Tensor, mask: Masks | None, **options: Any) -> Tensor:
        """Run the model itself; logits [N, V] of ids and positions [N]."""
        where = {"position_ids": positions[None], "attention_mask": mask, "past_key_values": self._layers}
        logits: Tensor = self.model(input_ids=ids[None], use_cache=True, **where, **options).logits[0]
        return logits

    def _mask(self, numbers: Tensor, length: int | Tensor, columns: int) -> Tensor:
        """Return the additive mask [1, 1, N, S] of rows with these numbers [N, 2 + M], which `_compile` describes."""
        hidden = hidden_columns(self._column_s[:columns], numbers[:, 0], length, numbers[:, 2:])
        return additive_mask(hidden, self.model.dtype)[None, None]

    # ---- compiled ----

    def keep_sizes(self) -> None:
        """Compile for no further tree sizes: larger trees run uncompiled, so that no compilation is timed."""
        self._grows = False

    def _size_of(self, num_rows: int) -> int:
        """Return the number of rows that trees of this size are padded to; 0: they run without compilation.

        With `same_size` it is that of the largest tree so far, known once every method has answered a question.
        """
        known = next((size for size in self.sizes if size >= num_rows), 0)
        if not known and self._grows:
            known = aligned(num_rows) if self.same_size else padded_rows(num_rows)
            # The cache has room for the largest tree with its root, and for no padding after it.
            known = max(num_rows, min(known, LONGEST_TREE_NODES + 1))
            self.sizes = [known] if self.same_size else sorted([*self.sizes, known])
        return known

    def _run_compiled(
        self, tokens: Sequence[int], drafted: Tensor | None, numbers: Tensor, size: int
    ) -> tuple[Tensor, Tensor]:
        """Run `size` rows, the first with these numbers."""
        num_rows = len(numbers)
        ids = [for_device(list(tokens), self.device), *([] if drafted is None else [drafted])]
        logits, features = self._graphs(size, ids, for_device(numbers, self.device))
        return logits[:num_rows], self._features(features[:num_rows].clone())  # drafters keep them

    def _compile(self) -> None:
        """Compile from scratch at the next forward."""
        assert self.compiler is not None
        model, cache, tap, column_s = self.model, self.cache, self._tap, self._column_s
        fuse_projections(model)

        def run(ids: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
            """Return logits [N, V] and features [N, F] of nodes of tokens [N].

            Args:
                numbers: [N, 2 + N]: the nodes' positions, the number of committed tokens, and the nodes they see.
            """
            cache.write_at(numbers[0, 1] + column_s[: len(ids)], cache.capacity)
            logits = self._logits(ids, numbers[:, 0], self._mask(numbers, numbers[0, 1], cache.capacity))
            cache.write_at(0, 0)
            return logits, tap.take()[0]

        what = f"target {model.config.name_or_path or type(model).__name__}"
        self._graphs = Graphs(run, what, self.device, self.compiler.backend, self.compiler.must)


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view of a `KVCache`, in the form that transformers expects."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: KVCache, index: int, num_layers: int, is_static: bool) -> None:
        super().__init__()
        self._cache, self._index, self._num_layers, self.is_compileable = cache, index, num_layers, is_static

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take this layer's part of the cache, which the first layer allocates. Keys and values are [1, G, N, D]."""
        cache = self._cache
        if not cache.layers:
            cache.allocate(self._num_layers, key_states, value_states)
        self.keys, self.values = cache.layers[self._index]
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            if (held.shape[1], held.shape[3], held.device) != (states.shape[1], states.shape[3], states.device):
                raise UserError(
                    "the target's layers differ in key-value heads, head size or device, which the tree cache does not "
                    "support: use a target with equal layers on one device, such as Llama, Qwen, Mistral or GPT-2"
                )
            if self.is_compileable:
                torch._dynamo.mark_static_address(held)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values [1, G, N, D] into the cache; return those that the rows attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self._cache.update((self.keys, self.values), (key_states, value_states))

    def get_seq_length(self) -> int:
        # Not used, as positions are always given; a changing number would cause recompilation.
        first = self._cache.first
        return 0 if isinstance(first, Tensor) else first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.capacity
