"""Protocols of decoders, drafters while they decode one sequence, and the decoders made of cached decoder layers.

A drafter whose depths do not depend on each other's tokens decodes with a `DrafterDecoder` (ParallelSpec, Medusa); one
that reads its own drafted tokens with a `StepwiseDecoder` (Hydra, EAGLE; a Markov head, which is a `PathDecoder` too).

Of decoder layers are made `ParallelDecoder`, which drafts all depths in one forward, `PathDecoder`, which changes them
by the tokens of a path (`MarkovDecoder`), and `TreeDecoder`, which grows a tree level by level: a queue of final tokens
and a KV cache of their rows. Nothing is ever rolled back: committed tokens are final, and the rows of drafted ones are
overwritten.

Shapes: G depths, K masks, P prompt, n newly committed tokens, R rows of a forward, k of them kept, W tree nodes of one
call, M nodes so far, E input width of a layer, F features, D hidden, V the target's vocabulary, V' columns of the
logits, S capacity.
"""

import itertools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.compiling import BACKEND, StaticCall, padded_rows
from draftsmith.models.decoding.cached_attention import CachedAttention, masked_columns
from draftsmith.models.decoding.kv_cache import to_device, with_tokens, write_level, write_numbers
from draftsmith.models.kernels.cpu_layers import MOST_CALL_ROWS, CpuLayers, has_static_rope
from draftsmith.models.kernels.fused_projections import fuse_projections

LONGEST_TREE_NODES = 256
STATIC_TOKENS = 16  # new tokens of a compiled forward; more, as in a prompt, are read without compilation
FEWEST_STATIC_NODES = 8  # of a level in a compiled forward


class TokenColumns:
    """Map from the columns of a drafter's logits to token ids: of the whole vocabulary, or of a draft vocabulary.

    A drafter with a reduced draft vocabulary reads V' rows of a head, and its logits have V' columns. Trees are made of
    these columns and name the target's tokens; only what verification samples against is made V wide.

    Args:
        ids: [V'] the target's ids of the columns, ascending; None: all of its tokens, in order.
        vocabulary: V, where there are `ids`.
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
        """Return the target's ids of columns; -1, for no column, stays -1."""
        return columns if self.ids is None else [self._tokens[column] for column in columns]

    def widened(self, values: Tensor, elsewhere: float) -> Tensor:
        """Widen [..., V'] to [..., V], with `elsewhere` for the tokens that have no column."""
        if self.ids is None:
            return values
        wide = values.new_full((*values.shape[:-1], self._vocabulary), elsewhere)
        return wide.index_copy_(-1, self._ids_on(values.device), values)

    def device_tokens(self, columns: Tensor) -> Tensor:
        """Return the target's ids of columns [n], which exist, on their device."""
        return columns if self.ids is None else self._ids_on(columns.device).index_select(0, columns)

    def _ids_on(self, device: torch.device) -> Tensor:
        assert self.ids is not None
        if self._ids_on_device.device != device:
            self._ids_on_device = self.ids.to(device)
        return self._ids_on_device


ALL_TOKENS = TokenColumns()


class SequenceDecoder(Protocol):
    """A drafter while it decodes one sequence. `start` and `observe` only queue.

    The caller is in `torch.inference_mode` whenever it calls a decoder.
    """

    columns: TokenColumns  # what its logits are of

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        """Begin a sequence. prompt_ids [P]; features [P, F], row i being the target's AT prompt token i.

        `observe` follows before the first draft: the target predicts the token after the prompt.
        """

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Queue n >= 1 final tokens. committed_ids [n]; features [n, F], row i having PREDICTED committed_ids[i]."""


class DrafterDecoder(SequenceDecoder, Protocol):
    """Drafts all depths from one forward: a depth's logits do not depend on the tokens drafted before it."""

    def draft(self) -> Tensor:
        """Return fp32 logits [G, V'] of depths 1..G after the newest committed token; one forward."""


@runtime_checkable
class StepwiseDecoder(SequenceDecoder, Protocol):
    """Drafts a tree level by level: a node's children depend on the tokens of the path to it."""

    num_depths: int  # the longest path worth drafting

    def begin(self) -> Tensor:
        """Run the queued tokens. fp32 logits [1, V'] of the children of node 0, the newest committed token."""

    def expand(self, tokens: Any, parents: list[int]) -> Tensor:
        """Add W nodes below `parents`; fp32 logits [W, V'] of their children.

        Nodes are numbered 1, 2, ... in the order given over all calls since `begin`. The tokens are a list, or a tensor
        on the decoder's device.
        """


@runtime_checkable
class Compilable(Protocol):
    """A decoder whose rounds `torch.compile` can run."""

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the forwards of a round, before the first sequence."""


# ---- the decoders made of cached decoder layers ----


class CachedDecoder:
    """Base of the kinds' decoders: one sequence at a time, its pending tokens, its cache and its positions.

    Compiled, a draft is one `StaticCall` whatever its context: new tokens fill the first of `STATIC_TOKENS` rows, and
    rows attend to the whole cache, of which a mask hides what they do not see. The other rows' keys and values go to
    the cache's last column, which no row sees.

    Args:
        drafter: Has `layers_config`, `reads_first_token`, `sliding_window`, `real_inputs`, `run_layers`, `rotary_of`,
            `logits_of`, as `GroupWiseDrafter` has.
        max_length_tokens: Committed tokens that fit, the prompt included.
        extra_rows: Drafted rows that one forward, or one tree, may hold after them.
    """

    _static_rows = 1  # columns that compiled forwards may write after those of the rows that are wanted

    def __init__(self, drafter: Any, max_length_tokens: int, extra_rows: int) -> None:
        self._drafter, self._max_length_tokens, self._device = drafter, max_length_tokens, drafter.device
        self._extra_rows, self._window = extra_rows, drafter.sliding_window
        self._cache = self._make_cache(max_length_tokens + extra_rows)
        self._static: StaticCall | None = None
        self._backend: str | None = None  # of compilation
        self._masks_ke = torch.empty(0)  # rows after those of the new tokens
        cpu_layers = getattr(drafter, "cpu_layers", None)
        self._cpu_layers: CpuLayers | None = None if cpu_layers is None else cpu_layers()
        self._has_residual = False  # whether masks read the newest token too
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._skipped = 0  # tokens that have no row
        self._rotary_table: tuple[Tensor, Tensor] | None = None

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the forwards of a round, before the first sequence; prompts are read as before.

        Where RoPE's angles depend on the length they are not in a table, and nothing is compiled.
        """
        if has_static_rope(self._drafter.layers_config):
            self._cache = self._make_cache(self._max_length_tokens + self._extra_rows + self._static_rows)
            for part in itertools.chain(*self._cache.layers):  # CUDA graphs write into static memory only
                torch._dynamo.mark_static_address(part)
            fuse_projections(self._drafter)
            self._rotary_table, self._backend = self._make_rotary_table(), backend

    def _static_call(self, function: Callable[..., Any], *inputs: Tensor) -> StaticCall:
        assert self._backend is not None
        return StaticCall(function, inputs, f"drafter {type(self._drafter).__name__}", self._backend)

    def _run_static(self, ids: Tensor, features: Tensor) -> Any:
        """Run the compiled forward of new tokens; return None if they are too many for it, or it fails.

        Args:
            ids: At most `STATIC_TOKENS`.
            features: [n, F] of the n new rows.
        """
        if self._backend is None or max(len(ids), len(features)) > STATIC_TOKENS:
            return None
        if self._static is None:
            inputs = torch.zeros(STATIC_TOKENS, dtype=torch.int64, device=self._device)
            rows = features.new_zeros(STATIC_TOKENS, features.shape[-1])
            self._static = self._static_call(self._static_forward(), inputs, rows, inputs[:2].clone())
        held_ids, held_features, place = self._static.inputs
        held_ids[: len(ids)].copy_(ids)
        held_features[: len(features)].copy_(features)
        write_numbers(place, [self._cache.length, len(features)])
        results = self._static.results()
        if results is None:
            self._backend = None
        return results

    def _static_forward(self) -> Callable[[Tensor, Tensor, Tensor], Any]:
        """Return a function of ids, features and (length, number of new tokens), which is compiled.

        Its results are the hidden states [1+K, D] and fp32 logits [1+K, V'] of the newest token and the masks.
        """
        drafter, cache, masks_ke, window = self._drafter, self._cache, self._masks_ke, self._window
        real_inputs, run_rows, has_residual = drafter.real_inputs, self._static_rows_of, self._has_residual
        columns = torch.arange(cache.capacity, device=self._device)

        def run(ids: Tensor, features: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
            begin, count = place.unbind()
            newest = place[1:] - 1
            inputs = real_inputs(ids, features)
            places = torch.where(columns[: len(ids)] < count, begin + columns[: len(ids)], columns[-1])
            if len(masks_ke):
                masks = masks_ke + inputs.index_select(0, newest) if has_residual else masks_ke
                inputs, num_masks = torch.cat([inputs, masks]), len(masks)
                places = torch.cat([places, begin + count + columns[:num_masks]])
                newest = torch.cat([newest, len(ids) + columns[:num_masks]])
            hidden = run_rows(inputs, places, places, masked_columns(columns, places, True, window))
            kept = hidden.index_select(0, newest)
            return kept, drafter.logits_of(kept).float()

        return run

    def _static_rows_of(self, inputs_re: Tensor, places: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """Run rows of a compiled forward; hidden states [R, D], given the columns [R, S] that they do not see."""
        self._cache.begin_static_step(places, hidden)
        rotary = self._rotary_of(inputs_re, positions)
        states: Tensor = self._drafter.run_layers(inputs_re[None], rotary, self._cache)[0]
        self._cache.end_static_step()
        return states

    def _make_cache(self, capacity: int) -> CachedAttention:
        config, dtype = self._drafter.layers_config, self._drafter.dtype
        return CachedAttention(config, capacity, self._device, dtype, self._window)

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        """Begin a sequence. ids [P], features [P, F] AT them."""
        skipped = int(not self._drafter.reads_first_token)
        previous = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        self._pending = [(prompt_ids[skipped:], previous[skipped:])]
        self._begin_sequence(skipped)

    def _begin_sequence(self, skipped: int) -> None:
        """Forget the last sequence; the first row of this one is of the token after `skipped` ones."""
        self._cache.length, self._skipped = 0, skipped
        table = self._make_rotary_table()
        if self._cpu_layers is not None:
            self._cpu_layers.refresh(None if table is None else (table[0][0], table[1][0]))
        if self._backend is None or self._rotary_table is None or table is None:
            self._rotary_table = table
            return
        for held, part in zip(self._rotary_table, table, strict=True):  # a compiled forward reads them where they are
            held.copy_(part)

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Queue n >= 1 final tokens [n] with the features [n, F] that predicted them."""
        self._pending.append((committed_ids, features))

    def _take_pending(self) -> tuple[Tensor, Tensor]:
        """Return ids [n] and features [n, F] of all queued tokens, and clear the queue."""
        if not self._pending:
            raise ValueError("drafting needs a new token: call observe() first")
        queued = self._pending
        ids, features = queued[0] if len(queued) == 1 else map(torch.cat, zip(*queued, strict=True))
        length = self._cache.length + len(ids)
        if length > self._max_length_tokens:
            raise ValueError(
                f"{length} tokens, but decoder(max_length_tokens={self._max_length_tokens}): make it larger"
            )
        self._pending = []
        return ids, features

    def _is_one_call(self, num_rows: int) -> bool:
        """Return True if causal rows after the cached ones are one call of `CpuLayers`, which needs no mask."""
        is_fit = self._cpu_layers is not None and num_rows <= MOST_CALL_ROWS
        return is_fit and not self._cache.is_beyond_window(num_rows)

    def _read_ahead(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Run the first rows of a long prompt, `MOST_CALL_ROWS` at a time; return those that fit into one call.

        Args:
            ids, features: As `_take_pending` returns them.
        """
        while (more := len(ids) + len(self._masks_ke) - MOST_CALL_ROWS) > 0:
            rows, begin = min(more, MOST_CALL_ROWS), self._cache.length
            if not self._is_one_call(rows):
                break
            self._cache.begin_step(rows, has_mask=False)
            self._hidden_of(
                self._drafter.real_inputs(ids[:rows], features[:rows]),
                self._rotary_of(features, slice(begin, begin + rows)),
            )
            self._cache.length += rows
            ids, features = ids[rows:], features[rows:]
        return ids, features

    def _causal_logits(self, inputs_re: Tensor, first_kept: int) -> tuple[Tensor, Tensor]:
        """Run rows that follow the cached ones; hidden [k, D] and fp32 logits [k, V'] from `first_kept` on."""
        begin, num_rows = self._cache.length, len(inputs_re)
        self._cache.begin_step(num_rows, has_mask=not self._is_one_call(num_rows))
        return self._run_rows(inputs_re, self._rotary_of(inputs_re, slice(begin, begin + num_rows)), first_kept)

    def _run_rows(self, inputs_re: Tensor, rotary: tuple[Tensor, Tensor], first_kept: int = 0) -> tuple[Tensor, Tensor]:
        """Run the rows of the cache's current step; hidden [k, D] and fp32 logits [k, V'] from `first_kept` on."""
        drafter, layers = self._drafter, self._cpu_layers
        if layers is None or len(inputs_re) > MOST_CALL_ROWS:
            kept = self._hidden_of(inputs_re, rotary)[first_kept:]
            return kept, drafter.logits_of(kept).float()
        hidden, normed, logits = self._cache.run(layers, inputs_re, rotary, first_kept, layers.has_head)
        return hidden[first_kept:], logits if layers.has_head else drafter.head_logits(normed[first_kept:]).float()

    def _hidden_of(self, inputs_re: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return hidden states [R, D] of the rows of the cache's current step, before the final norm."""
        if self._cpu_layers is None or len(inputs_re) > MOST_CALL_ROWS:
            return self._drafter.run_layers(inputs_re.unsqueeze(0), rotary, self._cache)[0]
        return self._cache.run(self._cpu_layers, inputs_re, rotary, 0, False)[0]

    def _make_rotary_table(self) -> tuple[Tensor, Tensor] | None:
        """Compute cos and sin of all positions; None if they depend on more than the position."""
        if not has_static_rope(self._drafter.layers_config):
            return None
        positions = torch.arange(self._cache.capacity, device=self._device).unsqueeze(0) + self._skipped
        return self._drafter.rotary_of(torch.empty(0, device=self._device, dtype=self._drafter.dtype), positions)

    def _rotary_of(self, hidden: Tensor, where: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1, R, Dh] at these places of the sequence."""
        if self._rotary_table is not None:
            cos, sin = self._rotary_table
            return cos[:, where], sin[:, where]
        places = torch.arange(where.start, where.stop, device=self._device) if isinstance(where, slice) else where
        return self._drafter.rotary_of(hidden, places.unsqueeze(0) + self._skipped)


class ParallelDecoder(CachedDecoder):
    """The decoder of group-wise drafters with masks; see `DrafterDecoder`."""

    def __init__(self, drafter: Any, max_length_tokens: int) -> None:
        super().__init__(drafter, max_length_tokens, extra_rows=drafter.config.num_masks)
        self.columns = drafter.columns
        self._masks_ke, self._has_residual = drafter.mask_inputs().detach(), drafter.mask_residual

    def draft(self) -> Tensor:
        """Return fp32 logits [G, V'] of depths 1..G after the newest committed token; one forward of n+K rows."""
        ids, features = self._read_ahead(*self._take_pending())
        layers, begin, rows = self._cpu_layers, self._cache.length, len(ids) + len(self._masks_ke)
        if (results := self._run_static(ids, features)) is not None:
            _, logits_gv = results
        elif (
            layers is not None
            and layers.has_fusion
            and features.dtype == self._masks_ke.dtype
            and self._is_one_call(rows)
        ):
            logits_gv = layers.draft(ids, features, self._cache.keys, self._cache.values, begin)
        else:
            real_ne = self._drafter.real_inputs(ids, features)
            masks_ke = self._masks_ke + real_ne[-1:] if self._has_residual else self._masks_ke
            _, logits_gv = self._causal_logits(torch.cat([real_ne, masks_ke]), len(ids) - 1)
        # The masks' keys and values are stored after `length`: the next round overwrites them.
        self._cache.length += len(ids)
        return logits_gv


class PathDecoder:
    """A `StepwiseDecoder` over one that drafts all depths in one forward; no layer runs after `begin`.

    So `expand` costs next to nothing, however wide a level is. Subclasses add the effect of the previous token in
    `_after`.

    Args:
        decoder: Runs the one forward.
    """

    def __init__(self, decoder: Any, drafter: Any) -> None:
        self.num_depths, self.columns = drafter.config.num_depths, decoder.columns
        self._decoder, self._drafter, self._device = decoder, drafter, drafter.device
        self._newest_1 = torch.empty(0)
        self._depths: list[int] = []  # of every node

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the one forward, where it can be; what follows it is a few small operations."""
        if isinstance(self._decoder, Compilable):
            self._decoder.compile(backend)

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        self._decoder.start(prompt_ids, features)
        self._newest_1 = prompt_ids[-1:]

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        self._decoder.observe(committed_ids, features)
        self._newest_1 = committed_ids[-1:]

    def begin(self) -> Tensor:
        """Return fp32 logits [1, V'] of the children of the newest committed token."""
        self._draft()
        self._depths = [0]
        return self._after(self._newest_1, slice(0, 1))

    def expand(self, tokens: list[int] | Tensor, parents: list[int]) -> Tensor:
        """Return fp32 logits [W, V'] of the children of W new nodes below `parents`."""
        depths = depths_below(parents, self._depths, self.num_depths, f"{self.num_depths} depths are drafted")
        self._depths += depths
        tokens_w, depths_w = with_tokens(tokens, self._device, depths)
        return self._after(tokens_w, depths_w)

    def _draft(self) -> None:
        """Run the one forward, and keep what `_after` reads."""
        raise NotImplementedError

    def _after(self, tokens_w: Tensor, depths_w: Tensor | slice) -> Tensor:
        """Return fp32 logits [W, V'] of these depths after these tokens."""
        raise NotImplementedError


class MarkovDecoder(PathDecoder):
    """Decoder that adds the Markov head's bias by the previous token."""

    def _draft(self) -> None:
        self._logits_gv = self._decoder.draft()

    def _after(self, tokens_w: Tensor, depths_w: Tensor | slice) -> Tensor:
        return self._logits_gv[depths_w] + self._drafter.markov_head(tokens_w).float()


def depths_below(
    parents: list[int], depths: list[int], num_depths: int = LONGEST_TREE_NODES, limit: str = ""
) -> list[int]:
    """Return the depths of W new nodes below `parents`, [W].

    Args:
        depths: Depths of the existing nodes.
        num_depths: Nodes of this depth would have no children.
        limit: Reason for that limit, for the error.

    Raises:
        ValueError: A parent does not exist, or nothing is drafted so deep.
    """
    if not depths or max(parents) >= len(depths):
        raise ValueError(f"parents {parents} must be among the {len(depths)} nodes there are: begin() first")
    below = [depths[parent] + 1 for parent in parents]
    if max(below) >= num_depths:
        raise ValueError(f"a node at depth {max(below)} has no children: {limit}")
    return below


def check_tree_size(nodes: int) -> None:
    """Check that a decoder has room for a tree of this many nodes.

    Raises:
        UserError: It has not.
    """
    if nodes > LONGEST_TREE_NODES:
        raise UserError(
            f"a draft tree that expands {nodes} nodes is too large: use at most {LONGEST_TREE_NODES}, with a smaller "
            "`branch` or `max_depth` of the method"
        )


class GrowingTree:
    """The nodes of a draft tree while it grows level by level: their depths, and which nodes each sees.

    Node 0 is the newest committed token, which every node sees.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.parents: list[int] = []  # of the nodes 1, 2, ...: the place of the parent among these, -1 for node 0
        self.depths: list[int] = []  # of all nodes

    def begin(self) -> None:
        """Start a tree of node 0 alone."""
        self.depths, self.parents = [0], []

    def grow(self, parents: list[int]) -> list[int]:
        """Add W nodes below `parents`; return their depths.

        Raises:
            ValueError: A parent does not exist.
            UserError: The tree grows too large.
        """
        check_tree_size(len(self.depths) + len(parents))
        depths = depths_below(parents, self.depths)
        self.depths += depths
        self.parents += [parent - 1 for parent in parents]
        return depths

    def seen_by_last(self, count: int) -> Tensor:
        """Return [W, M] bool on the device, which nodes after node 0 each of the last W sees, itself too."""
        nodes = len(self.parents)
        rows = bytearray(count * nodes)
        for row, node in enumerate(range(nodes - count, nodes)):
            while node >= 0:
                rows[row * nodes + node] = 1
                node = self.parents[node]
        return to_device(torch.frombuffer(rows, dtype=torch.bool).view(count, nodes), self._device)


class TreeDecoder(CachedDecoder):
    """The decoder of drafters that read their own output (EAGLE); see `StepwiseDecoder`.

    A drafted node stands where the committed tokens end plus its depth, sees all of them and its own ancestors, and
    reads its parent's output (`drafted_inputs`) in place of the target's feature.

    A level is one function of tensors that stay on the device: outputs, ancestors and depths of all nodes. Compiled it
    is a `StaticCall`, whose nodes are padded to a power of two; the next level overwrites the padding. On a CPU the
    levels of a tree inside the window are calls of `CpuLayers` instead.
    """

    _static_rows = LONGEST_TREE_NODES

    def __init__(self, drafter: Any, max_length_tokens: int, num_depths: int) -> None:
        super().__init__(drafter, max_length_tokens, extra_rows=LONGEST_TREE_NODES)
        self.num_depths, self.columns = num_depths, drafter.columns
        self._tree = GrowingTree(self._device)
        self._has_calls = False  # for the levels of this tree
        self._levels: dict[int, StaticCall] = {}  # by the number of nodes
        # The last node is none, so that it is nobody's ancestor.
        nodes, width = 2 * LONGEST_TREE_NODES + 1, drafter.layers_config.hidden_size
        self._outputs = torch.zeros(nodes, width, dtype=drafter.dtype, device=self._device)
        self._ancestors = torch.zeros(nodes, nodes, dtype=torch.uint8, device=self._device)
        self._depths = torch.zeros(nodes, dtype=torch.int64, device=self._device)

    def compile(self, backend: str = BACKEND) -> None:
        super().compile(backend)
        for part in (self._outputs, self._ancestors, self._depths):
            torch._dynamo.mark_static_address(part)

    def begin(self) -> Tensor:
        """Return fp32 logits [1, V'] of the children of the newest committed token."""
        ids, features = self._read_ahead(*self._take_pending())
        results = self._run_static(ids, features)
        if results is None:
            results = self._causal_logits(self._drafter.real_inputs(ids, features), len(ids) - 1)
        newest_1d, logits_1v = results
        self._cache.length += len(ids)
        self._outputs[:1].copy_(newest_1d)
        self._tree.begin()
        self._has_calls = self._backend is None and self._is_one_call(self.num_depths)
        return logits_1v

    def expand(self, tokens: list[int] | Tensor, parents: list[int]) -> Tensor:
        """Return fp32 logits [W, V'] of the children of W new nodes below `parents`."""
        first, nodes = len(self._tree.depths), len(parents)
        depths = self._tree.grow(parents)
        if self._has_calls:
            ids, parents_w, depths_w = with_tokens(tokens, self._device, parents, depths)
            inputs_we = self._drafter.drafted_inputs(ids, self._outputs.index_select(0, parents_w))
            self._cache.begin_step(nodes, has_mask=False, parents=self._tree.parents)
            rotary = self._rotary_of(inputs_we, depths_w + (self._cache.length - 1))
            hidden_wd, logits_wv = self._run_rows(inputs_we, rotary)
            self._outputs[first : first + nodes].copy_(hidden_wd)
            return logits_wv
        if self._backend is not None:
            size = max(FEWEST_STATIC_NODES, padded_rows(nodes))
            if size not in self._levels:
                numbers = torch.zeros(4, size, dtype=torch.int64, device=self._device)
                self._levels[size] = self._static_call(self._level_forward(), numbers)
            call = self._levels[size]
            write_level(call.inputs[0], tokens, parents, [first] * size, [self._cache.length] * size)
            logits: Tensor | None = call.results()
            if logits is not None:
                return logits[:nodes]
            self._backend = None
        rows = with_tokens(tokens, self._device, parents, [first] * nodes, [self._cache.length] * nodes)
        return self._level_forward()(torch.stack(rows))

    def _level_forward(self) -> Callable[[Tensor], Tensor]:
        """Return a function of tokens, parents, first node and length, [4, W]; it may be compiled."""
        drafter, run_rows, window = self._drafter, self._static_rows_of, self._window
        outputs, ancestors, depths = self._outputs, self._ancestors, self._depths
        columns, nodes = (torch.arange(each, device=self._device) for each in (self._cache.capacity, len(ancestors)))

        def run(numbers: Tensor) -> Tensor:
            tokens, parents, firsts, lengths = numbers.unbind()
            node_w, length = firsts + nodes[: len(tokens)], lengths[0]
            is_itself = nodes == node_w[:, None]
            seen = ancestors.index_select(0, parents).masked_fill(is_itself, 1)
            depth_w = depths.index_select(0, parents) + 1
            # Node 0 is the newest committed token; what is beyond the nodes is seen by none.
            node_s = columns - (length - 1)
            of_node = seen.index_select(1, node_s.clamp(0, len(ancestors) - 1))
            hidden = (node_s > 0) & (of_node == 0)
            position_w = length - 1 + depth_w
            if window is not None:  # wider than the tree is deep: only committed tokens are outside
                hidden |= columns <= position_w[:, None] - window
            inputs_we = drafter.drafted_inputs(tokens, outputs.index_select(0, parents))
            states = run_rows(inputs_we, length - 1 + node_w, position_w, hidden)
            outputs.index_copy_(0, node_w, states)
            ancestors.index_copy_(0, node_w, seen)
            depths.index_copy_(0, node_w, depth_w)
            logits: Tensor = drafter.logits_of(states)
            return logits.float()

        return run
