"""Protocols of decoders, drafters while they decode one sequence, and the decoders made of cached decoder layers.

A drafter whose depths do not depend on each other's tokens decodes with a `DrafterDecoder` (ParallelSpec, Medusa); one
that reads its own drafted tokens with a `StepwiseDecoder` (Hydra, EAGLE; a Markov head, which is a `PathDecoder` too).

Three decoders run decoder layers, with a queue of committed tokens and a KV cache of their rows (`cached_layers.py`):
`ParallelDecoder` drafts all depths in one forward; `PathDecoder` changes these by the tokens of a path
(`MarkovDecoder`); `TreeDecoder` grows a tree level by level. Nothing is ever rolled back: committed tokens are final,
and the rows of draft tokens are overwritten.

Shapes: G depths, P prompt, n newly committed tokens, W tree nodes of one call, M nodes so far, D hidden, F features, V
the target's vocabulary, V' columns of the logits.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.compiling import BACKEND, Graphs, padded_rows
from draftsmith.models.decoding.cached_layers import CachedDecoder
from draftsmith.models.decoding.kv_cache import LONGEST_TREE_NODES, for_device, hidden_columns, seen_nodes, to_device

FEWEST_STATIC_NODES = 8  # of a level in a compiled forward


class TokenColumns:
    """Map from the columns of a drafter's logits to token ids: of the whole vocabulary, or of a draft vocabulary.

    A drafter with a reduced draft vocabulary reads V' rows of a head, and its logits have V' columns. Drafting
    picks columns, and trees hold the target's token ids; only the distributions for verification are made V wide.

    Args:
        ids: [V'] the target's token ids of the columns, ascending; None: all of its tokens, in order.
        vocabulary: V, needed only with `ids`.
    """

    def __init__(self, ids: Tensor | None = None, vocabulary: int = 0) -> None:
        self.ids, self._vocabulary = ids, vocabulary
        given: list[int] = [] if ids is None else ids.tolist()
        self._tokens = [*given, -1]  # column -1 is "none", and stays -1
        self._known = frozenset(given)
        self._ids_on_device = torch.empty(0) if ids is None else ids  # on the device used last

    def __contains__(self, token: int) -> bool:
        return self.ids is None or token in self._known

    def tokens(self, columns: list[int]) -> list[int]:
        """Return the target's token ids of columns; -1, for no column, stays -1."""
        return columns if self.ids is None else [self._tokens[column] for column in columns]

    def widened(self, values: Tensor, elsewhere: float) -> Tensor:
        """Widen values [..., V'] to the target's vocabulary [..., V]; tokens without a column get `elsewhere`."""
        if self.ids is None:
            return values
        wide = values.new_full((*values.shape[:-1], self._vocabulary), elsewhere)
        return wide.index_copy_(-1, self._ids_on(values.device), values)

    def device_tokens(self, columns: Tensor) -> Tensor:
        """Return the target's token ids of columns [n], on their device; no column may be -1."""
        return columns if self.ids is None else self._ids_on(columns.device).index_select(0, columns)

    def _ids_on(self, device: torch.device) -> Tensor:
        assert self.ids is not None
        if self._ids_on_device.device != device:
            self._ids_on_device = self.ids.to(device)
        return self._ids_on_device


ALL_TOKENS = TokenColumns()


class SequenceDecoder(Protocol):
    """A drafter while it decodes one sequence. `start` and `observe` only queue tokens; drafting runs the drafter.

    The caller is in `torch.inference_mode` whenever it calls a decoder.
    """

    columns: TokenColumns  # what its logits are of

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        """Start a sequence. prompt_ids [P]; features [P, F] of the target, row i AT prompt token i.

        Call `observe` before the first draft, with the token that the target predicts after the prompt.
        """

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Queue n >= 1 committed tokens [n], with features [n, F]: row i is the one that PREDICTED committed_ids[i]."""


class DrafterDecoder(SequenceDecoder, Protocol):
    """Decoder that drafts all depths in one forward: a depth's logits do not depend on the tokens drafted before it."""

    def draft(self) -> Tensor:
        """Return fp32 logits [G, V'] of depths 1..G after the newest committed token; one forward."""


@runtime_checkable
class StepwiseDecoder(SequenceDecoder, Protocol):
    """Decoder that drafts a tree level by level: a node's children depend on the tokens of the path to it."""

    num_depths: int  # the longest path worth drafting

    def begin(self) -> Tensor:
        """Run the queued tokens; return fp32 logits [1, V'] for the children of node 0, the newest committed token."""

    def expand(self, tokens: Any, parents: list[int]) -> Tensor:
        """Add W nodes, one below each of `parents`; return fp32 logits [W, V'] for their children.

        Nodes are numbered 1, 2, ... in the order in which they are added after `begin`. The tokens are a list, or a
        tensor on the decoder's device.
        """


@runtime_checkable
class Compilable(Protocol):
    """A decoder whose forwards `torch.compile` can compile."""

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the forwards of a round; call it before the first sequence."""


# ---- the decoders made of cached decoder layers ----


class GrowingTree:
    """The nodes of a draft tree while it grows level by level. Node 0 is the newest committed token.

    Args:
        num_depths: Nodes of this depth have no children.
        limit: Reason for that limit, for the error message.
    """

    def __init__(self, num_depths: int = LONGEST_TREE_NODES, limit: str = "") -> None:
        self._num_depths, self._limit = num_depths, limit
        self.parents: list[int] = []  # of the nodes 1, 2, ...: the place of the parent among these, -1 for node 0
        self.depths: list[int] = []  # of all nodes

    def begin(self) -> None:
        """Start a new tree that has only node 0, the newest committed token."""
        self.depths, self.parents = [0], []

    def grow(self, parents: Sequence[int]) -> list[int]:
        """Add W nodes, one below each of `parents`; return their depths.

        Raises:
            ValueError: A parent does not exist, or a new node would be at depth `num_depths` or deeper.
            UserError: The tree grows too large.
        """
        known, nodes = len(self.depths), len(self.depths) + len(parents)
        if nodes > LONGEST_TREE_NODES:
            raise UserError(
                f"a draft tree that expands {nodes} nodes is too large: use at most {LONGEST_TREE_NODES}, with a "
                "smaller `branch` or `max_depth` of the method"
            )
        if not known or max(parents) >= known:
            raise ValueError(f"parents {parents} must be among the tree's {known} nodes: call begin() first")
        depths = [self.depths[parent] + 1 for parent in parents]
        if max(depths) >= self._num_depths:
            raise ValueError(f"a node at depth {max(depths)} has no children: {self._limit}")
        self.depths += depths
        self.parents += [parent - 1 for parent in parents]
        return depths


class ParallelDecoder(CachedDecoder):
    """The decoder of drafters with masks, which drafts all depths in one forward; see `DrafterDecoder`."""

    _reads_hidden = False

    def __init__(self, drafter: Any, max_length_tokens: int) -> None:
        super().__init__(drafter, max_length_tokens, extra_rows=drafter.config.num_masks)
        self.columns = drafter.columns
        self._masks_ke, self._has_residual = drafter.mask_inputs().detach(), drafter.mask_residual

    def draft(self) -> Tensor:
        """Return fp32 logits [G, V'] of depths 1..G after the newest committed token; one forward of n+K rows."""
        return self._read_pending()[1]


class PathDecoder:
    """A `StepwiseDecoder` over a decoder that drafts all depths in one forward, which `begin` runs.

    `expand` runs no layer, so that wide levels cost next to nothing. Subclasses add the effect of the previous token
    in `_after`.

    Args:
        decoder: The `DrafterDecoder` that runs the forward.
    """

    def __init__(self, decoder: Any, drafter: Any) -> None:
        self.num_depths, self.columns = drafter.config.num_depths, decoder.columns
        self._decoder, self._drafter, self._device = decoder, drafter, drafter.device
        self._newest_1 = torch.empty(0)
        self._tree = GrowingTree(self.num_depths, f"{self.num_depths} depths are drafted")

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the forward of the wrapped decoder, if it can be compiled; the rest is a few small operations."""
        if isinstance(self._decoder, Compilable):
            self._decoder.compile(backend)

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        self._decoder.start(prompt_ids, features)
        self._newest_1 = prompt_ids[-1:]

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        self._decoder.observe(committed_ids, features)
        self._newest_1 = committed_ids[-1:]

    def begin(self) -> Tensor:
        """Run the forward; return fp32 logits [1, V'] for the children of the newest committed token."""
        self._draft()
        self._tree.begin()
        return self._after(self._newest_1, slice(0, 1))

    def expand(self, tokens: list[int] | Tensor, parents: list[int]) -> Tensor:
        """Add W nodes, one below each of `parents`; return fp32 logits [W, V'] for their children."""
        depths = self._tree.grow(parents)
        return self._after(to_device(tokens, self._device), to_device(depths, self._device))

    def _draft(self) -> None:
        """Run the one forward, and keep what `_after` reads."""
        raise NotImplementedError

    def _after(self, tokens_w: Tensor, depths_w: Tensor | slice) -> Tensor:
        """Return fp32 logits [W, V'] of these depths after these tokens."""
        raise NotImplementedError


class MarkovDecoder(PathDecoder):
    """`PathDecoder` that adds the Markov head's bias, given the previous token, to the wrapped decoder's logits."""

    def _draft(self) -> None:
        self._logits_gv = self._decoder.draft()

    def _after(self, tokens_w: Tensor, depths_w: Tensor | slice) -> Tensor:
        return self._logits_gv[depths_w] + self._drafter.markov_head(tokens_w).float()


class TreeDecoder(CachedDecoder):
    """The decoder of drafters that read their own output (EAGLE); see `StepwiseDecoder`.

    The position of a draft node is that of the newest committed token plus the node's depth. It sees all committed
    tokens and its ancestors, and reads its parent's output (`drafted_inputs`) in place of the target's feature.

    The outputs of all nodes stay on the device. Compiled, a level is padded to a power of two nodes, and the next level
    overwrites the padding. On a CPU a level of a tree inside the window is one call of `CpuLayers`.
    """

    def __init__(self, drafter: Any, max_length_tokens: int, num_depths: int) -> None:
        super().__init__(drafter, max_length_tokens, extra_rows=2 * LONGEST_TREE_NODES)
        self.num_depths, self.columns = num_depths, drafter.columns
        self._tree = GrowingTree()
        nodes, width = 2 * LONGEST_TREE_NODES, drafter.layers_config.hidden_size
        self._outputs = torch.zeros(nodes, width, dtype=drafter.dtype, device=self._device)
        self._levels: Graphs | None = None

    def compile(self, backend: str = BACKEND) -> None:
        super().compile(backend)
        torch._dynamo.mark_static_address(self._outputs)
        if self._is_compiled:
            self._levels = self._graphs(self._run_level)

    def begin(self) -> Tensor:
        """Run the queued tokens; return fp32 logits [1, V'] for the children of the newest committed token."""
        newest_1d, logits_1v = self._read_pending()
        self._outputs[:1].copy_(newest_1d)
        self._tree.begin()
        return logits_1v

    def expand(self, tokens: list[int] | Tensor, parents: list[int]) -> Tensor:
        """Run W new nodes, one below each of `parents`; return fp32 logits [W, V'] for their children."""
        first, nodes, length = len(self._tree.depths), len(parents), self._cache.length
        positions = [length - 1 + depth for depth in self._tree.grow(parents)]
        if self._levels is None and self._is_one_call(nodes):
            ids, parent_w, position_w = to_device([list(tokens), parents, positions], self._device)
            inputs_we = self._drafter.drafted_inputs(ids, self._outputs.index_select(0, parent_w))
            rotary = self._rotary_of(inputs_we, position_w)
            hidden_wd, logits_wv = self._call(inputs_we, rotary, length + first - 1, 0, self._tree.parents)
            self._outputs[first : first + nodes].copy_(hidden_wd)
            return logits_wv
        # Parent, position, first node, committed tokens, and the nodes seen, all of which may be compared with.
        numbers = torch.zeros(nodes, 4 + LONGEST_TREE_NODES, dtype=torch.int64)
        numbers[:, :2] = torch.tensor([parents, positions]).T
        numbers[:, 2], numbers[:, 3] = first, length
        numbers[:, 4 : 4 + len(self._tree.parents)] = seen_nodes(tuple(self._tree.parents), nodes)
        ids, numbers = for_device(tokens, self._device), for_device(numbers, self._device)
        if self._levels is not None and self._levels.works:
            logits: Tensor = self._levels(max(FEWEST_STATIC_NODES, padded_rows(nodes)), ids, numbers)
            return logits[:nodes]
        return self._run_level(to_device(ids, self._device), to_device(numbers, self._device))

    def _run_level(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Run W new nodes; return fp32 logits [W, V'] of their children. It may be compiled.

        Args:
            ids: [W].
            numbers: [W, 4 + M]: see `expand`.
        """
        drafter, outputs = self._drafter, self._outputs
        parent_w, position_w, first, length = numbers[:, 0], numbers[:, 1], numbers[0, 2], numbers[0, 3]
        node_w = first + self._column_s[: len(ids)]
        inputs_we = drafter.drafted_inputs(ids, outputs.index_select(0, parent_w))
        hidden_ws = hidden_columns(self._column_s, position_w, length, numbers[:, 4:], self._window)
        states = self._run_rows(inputs_we, length - 1 + node_w, position_w, hidden_ws)
        outputs.index_copy_(0, node_w, states)
        logits: Tensor = drafter.logits_of(states)
        return logits.float()
