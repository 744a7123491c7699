"""What a decoder is, a drafter while it decodes one sequence, and the decoders made of cached decoder layers.

A drafter whose depths do not depend on each other's tokens decodes with a `DrafterDecoder` (ParallelSpec, Medusa); one
that reads its own drafted tokens with a `StepwiseDecoder` (Hydra, EAGLE; a Markov head, which is `OneForward` too).

Of decoder layers are made `ParallelDecoder`, which drafts all depths in one forward, `PathDecoder`, which changes them
by the tokens of a path (`MarkovDecoder`), and `TreeDecoder`, which grows a tree level by level: a queue of final tokens
and a KV cache of their rows. Nothing is ever rolled back: committed tokens are final, and the rows of drafted ones are
overwritten.

Shapes: G depths, K masks, P prompt, n newly committed tokens, R rows of a forward, k of them kept, W tree nodes of one
call, M nodes so far, E input width of a layer, F features, D hidden, V the target's vocabulary, V' columns of the
logits, S capacity.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.models.compiling import BACKEND, compiled
from draftsmith.models.cpu_kernels import MOST_ROWS, can_attend
from draftsmith.models.cpu_layers import CpuLayers, has_static_rope, head_size, num_kv_heads
from draftsmith.models.target.features import FINAL_FEATURES

LONGEST_TREE_NODES = 256
SMALL_STEP_TOKENS = 16  # pending tokens up to this many use masks that were made beforehand
LONGEST_STATIC_ROWS = 32  # of a compiled forward
Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


ALIGNMENT = 8  # elements


def aligned(columns: int) -> int:
    """The next multiple of the alignment."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def open_mask(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [..., R, S], which hide nothing, with rows that begin aligned."""
    return torch.zeros(*shape[:-1], aligned(shape[-1]), dtype=dtype, device=device)[..., : shape[-1]]


def to_device(values: Any, device: torch.device) -> Tensor:
    """A tensor, or nested lists of integers of equal lengths as an int64 tensor.

    A copy from ordinary memory waits for all that a GPU has to do; one from pinned memory joins the queue.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class TokenColumns:
    """Which tokens the columns of a drafter's logits are: all of the target's, or those of a draft vocabulary.

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
        self._ids_there = torch.empty(0) if ids is None else ids  # where they were last asked for

    @property
    def reduced(self) -> bool:
        """Whether tokens are missing, or may be."""
        return self.ids is not None

    def __contains__(self, token: int) -> bool:
        return self.ids is None or token in self._known

    def vocabulary_of(self, logits: Tensor) -> int:
        """V, for logits [..., V']."""
        return logits.shape[-1] if self.ids is None else self._vocabulary

    def tokens(self, columns: list[int]) -> list[int]:
        """The target's ids; -1, for no column, stays -1."""
        return columns if self.ids is None else [self._tokens[column] for column in columns]

    def widened(self, values: Tensor, elsewhere: float) -> Tensor:
        """[..., V'] to [..., V], with this value for the tokens that have no column."""
        if self.ids is None:
            return values
        if self._ids_there.device != values.device:
            self._ids_there = self.ids.to(values.device)
        wide = values.new_full((*values.shape[:-1], self._vocabulary), elsewhere)
        return wide.index_copy_(-1, self._ids_there, values)


ALL_TOKENS = TokenColumns()


class SequenceDecoder(Protocol):
    """A drafter while it decodes one sequence. `start` and `observe` only queue."""

    columns: TokenColumns  # what its logits are of

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        """Begin a sequence. prompt_ids [P]; features [P, F], row i being the target's AT prompt token i."""

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Tokens that are final. committed_ids [n]; features [n, F], row i having PREDICTED committed_ids[i]."""


class DrafterDecoder(SequenceDecoder, Protocol):
    """All depths from one forward: what a depth drafts does not depend on the tokens drafted before it."""

    def draft(self) -> Tensor:
        """fp32 logits [G, V'] of depths 1..G after the newest committed token; one forward."""


@runtime_checkable
class StepwiseDecoder(SequenceDecoder, Protocol):
    """A tree level by level: what a node's children are depends on the tokens of the path to it."""

    num_depths: int  # the longest path worth drafting

    def begin(self) -> Tensor:
        """Read what is queued. fp32 logits [1, V'] of the children of node 0, the newest committed token."""

    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Add W nodes below `parents`; fp32 logits [W, V'] of their children.

        Nodes are numbered 1, 2, ... in the order given over all calls since `begin`.
        """


@runtime_checkable
class OneForward(Protocol):
    """A stepwise decoder whose layers run in `begin` alone: `expand` costs next to nothing, however wide a level is."""

    one_forward: bool


@runtime_checkable
class ReadsTokens(Protocol):
    """A decoder that looks tokens up on the host: it is given lists, and tensors of the CPU, wherever the target is."""

    reads_tokens: bool


@runtime_checkable
class Compilable(Protocol):
    """A decoder whose rounds `torch.compile` can run."""

    def compile(self, backend: str = BACKEND) -> None:
        """Before the first sequence."""


# ---- the decoders made of cached decoder layers ----


def cache_shape(config: PreTrainedConfig, batch_size: int, capacity: int) -> tuple[int, ...]:
    """(layers, keys and values, B, Hkv, capacity, Dh) of what these layers keep of B sequences."""
    return (config.num_hidden_layers, 2, batch_size, num_kv_heads(config), capacity, head_size(config))


def hidden_from(columns: Tensor, rows: Tensor, causal: bool, window: int | None) -> Tensor:
    """[R, S] bool: which columns [S] a row does not see, given both one's places in a sequence, whose last is a row's.

    Args:
        causal: Whether rows do not see each other's followers.
        window: As in `CachedAttention`.
    """
    hidden = columns > (rows if causal else rows[-1:])[:, None]
    if window is not None:
        hidden = hidden | (columns <= rows[:, None] - window)
    return hidden.expand(len(rows), -1)


class CachedAttention:
    """Keys and values of one sequence for all layers, and the mask of the current step.

    A causal step (`begin_step`) has R rows: the pending real tokens, then the K masks. All are written after the
    `length` real tokens that are there; only the real ones are kept, by the caller moving `length`. Causal order is
    exactly group attention here, since the masks of the newest group come after every real token.
    A tree step (`begin_tree_step`) adds R nodes of a draft tree after the `length` tokens and the nodes before them.

    Args:
        window: Of `begin_step`: how many tokens a row sees back from its own, that included, or None for all.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        capacity: int,
        max_rows: int,
        device: torch.device,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        capacity = aligned(capacity)
        self._keys_values = torch.zeros(cache_shape(config, 1, capacity), device=device, dtype=dtype)
        self._keys, self._values = self._keys_values.unbind(1)
        self.capacity, self.length = capacity, 0
        self._begin = 0  # where the rows of the current step are written
        self._repeats = config.num_attention_heads // self._keys_values.shape[3]
        # Row r may see columns <= length + r. A band holds this mask for every length: slices of it, not new masks.
        # There is one for each remainder of the length, so that every slice begins aligned.
        shape = (ALIGNMENT, max_rows, capacity + aligned(max_rows))
        bands = torch.full(shape, float("-inf"), device=device, dtype=dtype)
        for remainder, band in enumerate(bands):
            band.triu_(capacity + 1 - (-remainder % ALIGNMENT))
        self._bands = bands
        self._mask: Tensor | None = None
        self._window, self._first = window, 0  # the first column that the current step sees
        self._open = False  # whether a step without a mask sees everything
        self._causal = False  # whether the mask is that of causal order alone
        self._parents: list[int] | None = None  # of the nodes of a tree step that has no mask
        self._places: Tensor | None = None

    def hold_still(self) -> None:
        """Tell the compiler that the memory never moves: CUDA graphs refuse to write into any other."""
        torch._dynamo.mark_static_address(self._keys_values)

    def begin_static_step(self, places: Tensor, mask: Tensor) -> None:
        """Prepare a step that writes R rows at `places` and attends to the whole capacity; mask [R, capacity].

        For compiled forwards, whose shapes are then always the same; `end_static_step` goes back to the others.
        """
        self._places, self._mask = places, mask

    def end_static_step(self) -> None:
        """Go back to steps of any shape."""
        self._places = self._mask = None

    def append(self, keys_values: Tensor) -> None:
        """Write keys and values of all layers [L, 2, 1, Hkv, n, Dh] after the `length` stored ones, and add to that."""
        end = self.length + keys_values.shape[4]
        self._keys_values[..., self.length : end, :] = keys_values
        self.length = end

    def store_at(self, places: Tensor, keys_values: Tensor) -> None:
        """Write keys and values of all layers [L, 2, 1, Hkv, n, Dh] at `places`; for compiled forwards."""
        self._keys_values.index_copy_(4, places, keys_values)

    def begin_step(self, num_rows: int, causal: bool = True) -> None:
        """Prepare the mask that all layers of this step share; without `causal` its rows see each other."""
        begin, end = self.length, self.length + num_rows
        if self._window is not None and end > self._window:
            first = max(begin + 1 - self._window, 0)
            columns = torch.arange(first, end, device=self._keys_values.device)
            hidden = hidden_from(columns, columns[-num_rows:], causal, self._window)
            mask = open_mask(*hidden.shape, dtype=self._keys_values.dtype, device=hidden.device)
            self._prepare(begin, mask.masked_fill_(hidden, float("-inf")), first, is_open=not causal)
            return
        if begin == 0 or not causal:
            self._prepare(begin, is_causal=causal, is_open=not causal)
            return
        bands = self._bands
        if num_rows <= bands.shape[1]:
            column = self.capacity - aligned(begin)
            mask = bands[begin % ALIGNMENT, :num_rows, column : column + end]
        else:
            mask = open_mask(num_rows, end, dtype=bands.dtype, device=bands.device).fill_(float("-inf"))
            mask.triu_(begin + 1)
        self._prepare(begin, mask, is_causal=True)

    def begin_tree_step(self, ancestors: Tensor) -> None:
        """Prepare a step of R nodes. ancestors: [R, M] bool, whether a row sees each of the M nodes there will be then.

        The last R of the M nodes are the step's own; all real tokens are seen by every node.
        """
        num_rows, num_nodes = ancestors.shape
        keys_values = self._keys_values
        mask = open_mask(num_rows, self.length + num_nodes, dtype=keys_values.dtype, device=keys_values.device)
        mask[:, self.length :].masked_fill_(~ancestors.to(mask.device), float("-inf"))
        self._prepare(self.length + num_nodes - num_rows, mask)

    def begin_call(self, num_rows: int, parents: list[int] | None = None) -> None:
        """Prepare a step for `run`, which needs no mask: of causal rows, or of the last R nodes of a draft tree.

        Args:
            parents: Of the M nodes of the tree, -1 for those below node 0.
        """
        before = 0 if parents is None else len(parents) - num_rows
        self._prepare(self.length + before, is_causal=parents is None, parents=parents)

    def _prepare(
        self,
        begin: int,
        mask: Tensor | None = None,
        first: int = 0,
        is_causal: bool = False,
        is_open: bool = False,
        parents: list[int] | None = None,
    ) -> None:
        """Set all that the layers of a step share."""
        self._begin, self._mask, self._first = begin, mask, first
        self._causal, self._open, self._parents = is_causal, is_open, parents

    def run(
        self, layers: CpuLayers, inputs_re: Tensor, rotary: tuple[Tensor, Tensor], first_kept: int, with_logits: bool
    ) -> tuple[Tensor, Tensor]:
        """Run the current step's rows through all layers in one call.

        Returns:
            Hidden states [R, 2 D] before and after the final norm, and fp32 logits [k, V'] of the rows from
            `first_kept` on.
        """
        keys, values = self._keys, self._values
        if self._first:
            keys, values = (part[:, :, :, self._first :] for part in (keys, values))
        mask = None if self._causal else self._mask
        if mask is None and self._open:
            mask = self._keys_values.new_zeros(len(inputs_re), self._begin + len(inputs_re) - self._first)
        cos, sin = (part[0] for part in rotary)
        return layers.forward(
            inputs_re, (cos, sin), keys, values, self._begin - self._first, mask, (layers.num_layers, FINAL_FEATURES),
            parents=self._parents, first_kept=first_kept, with_logits=with_logits, wide=True,
        )  # fmt: skip

    def run_fused(
        self, layers: CpuLayers, inputs_re: Tensor, ids: Tensor, features: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """fp32 logits [k, V'] of causal rows from the last fused one on, see `CpuLayers.forward_fused`."""
        cos, sin = (part[0] for part in rotary)
        first_kept = len(ids) - 1
        return layers.forward_fused(
            inputs_re, ids, features, (cos, sin), self._keys, self._values, self.length, first_kept
        )

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[1, R, H, Dh] for queries [1, H, R, Dh]; stores the new keys and values [1, Hkv, R, Dh]."""
        keys, values = self._keys_values[layer_index]
        if self._places is None:
            begin, end = self._begin, self._begin + q_bhrd.shape[2]
            keys[:, :, begin:end] = k_bhrd
            values[:, :, begin:end] = v_bhrd
        else:
            end = self.capacity
            keys.index_copy_(2, self._places, k_bhrd)
            values.index_copy_(2, self._places, v_bhrd)
        if self._mask is None and not self._open:
            out = F.scaled_dot_product_attention(
                q_bhrd, k_bhrd, v_bhrd, is_causal=True, scale=scale, enable_gqa=self._repeats > 1
            )
            return out.transpose(1, 2)
        keys, values = keys[:, :, self._first : end], values[:, :, self._first : end]
        mask = None if self._mask is None else self._mask[None, None]
        if mask is not None and can_attend(q_bhrd, mask):
            return torch.ops.draftsmith.attention(q_bhrd, keys, values, mask, scale)
        if self._repeats == 1:
            return F.scaled_dot_product_attention(q_bhrd, keys, values, self._mask, scale=scale).transpose(1, 2)
        # Key heads as the batch and the query heads that share one as its heads: no key is copied.
        q_grouped = q_bhrd[0].unflatten(0, (-1, self._repeats))
        keys, values = (part[0].unsqueeze(1).expand(-1, self._repeats, -1, -1) for part in (keys, values))
        out = F.scaled_dot_product_attention(q_grouped, keys, values, self._mask, scale=scale)
        return out.flatten(0, 1).transpose(0, 1).unsqueeze(0)


class CachedDecoder:
    """What the kinds share: one sequence at a time, its pending tokens, its cache and its positions.

    Args:
        drafter: Has `layers_config`, `reads_first_token`, `real_inputs`, `run_layers`, `rotary_of`, `logits_of`, as
            `GroupWiseDrafter` has.
        max_length_tokens: Committed tokens that fit, the prompt included.
        extra_rows: Drafted rows that one forward, or one tree, may hold after them.
        window: As in `CachedAttention`.
    """

    def __init__(self, drafter: Any, max_length_tokens: int, extra_rows: int, window: int | None = None) -> None:
        self._drafter, self._max_length_tokens, self._device = drafter, max_length_tokens, drafter.device
        self._extra_rows, self._window = extra_rows, window
        self._cache = self._make_cache(max_length_tokens + extra_rows)
        self._static: StaticLayers | None = None
        few_rows = getattr(drafter, "few_rows", None)
        self._few_rows: CpuLayers | None = None if few_rows is None else few_rows()
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._position_offset = 0
        self._rotary_table: tuple[Tensor, Tensor] | None = None

    def compile(self, backend: str = BACKEND) -> None:
        """Compile what a round runs, before the first sequence; prompts are read as before."""
        self._cache = self._make_cache(self._max_length_tokens + self._extra_rows + LONGEST_STATIC_ROWS)
        self._static = StaticLayers(self._drafter, self._cache, backend)

    def _make_cache(self, capacity: int) -> CachedAttention:
        small_step = SMALL_STEP_TOKENS + min(self._extra_rows, SMALL_STEP_TOKENS)
        config, dtype = self._drafter.layers_config, self._drafter.dtype
        return CachedAttention(config, capacity, small_step, self._device, dtype, self._window)

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        """Begin a sequence whose first token has position id `position_offset`. ids [P], features [P, F] AT them."""
        if not self._drafter.reads_first_token and len(prompt_ids) > 1:
            self._pending, skipped = [(prompt_ids[1:], features[:-1])], 1
        else:  # a prompt of a single token keeps its row, since a draft may be asked for right after it
            previous = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
            self._pending, skipped = [(prompt_ids, previous)], 0
        self._begin_sequence(position_offset + skipped)

    def _begin_sequence(self, position_offset: int) -> None:
        """Forget the last sequence; the first row of this one has this position id."""
        self._cache.length, self._position_offset = 0, position_offset
        if self._few_rows is not None:
            self._few_rows.refresh()
        self._rotary_table = self._make_rotary_table()

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Queue final tokens [n] with the features [n, F] that predicted them."""
        if len(committed_ids):
            self._pending.append((committed_ids, features))

    def _take_pending(self) -> tuple[Tensor, Tensor]:
        """Ids [n] and features [n, F] of all that is queued."""
        if not self._pending:
            raise ValueError("drafting needs a new token: call start() or observe() first")
        queued = self._pending
        ids, features = queued[0] if len(queued) == 1 else map(torch.cat, zip(*queued, strict=True))
        length = self._cache.length + len(ids)
        if length > self._max_length_tokens:
            raise ValueError(
                f"{length} tokens, but decoder(max_length_tokens={self._max_length_tokens}): make it larger"
            )
        self._pending = []
        return ids, features

    def _causal_logits(self, inputs_re: Tensor, first_kept: int) -> tuple[Tensor, Tensor]:
        """Run rows that follow the cached ones; hidden [k, D] and fp32 logits [k, V'] from `first_kept` on."""
        if self._static is not None and len(inputs_re) <= LONGEST_STATIC_ROWS:
            return self._static.causal(inputs_re, first_kept, self._rotary_of)
        begin, num_rows = self._cache.length, len(inputs_re)
        if self._few_rows is not None and num_rows <= MOST_ROWS and self._window is None:
            self._cache.begin_call(num_rows)
        else:
            self._cache.begin_step(num_rows)
        return self._run_rows(inputs_re, self._rotary_of(inputs_re, slice(begin, begin + num_rows)), first_kept)

    def _run_rows(self, inputs_re: Tensor, rotary: tuple[Tensor, Tensor], first_kept: int = 0) -> tuple[Tensor, Tensor]:
        """Run the rows of the cache's current step; hidden [k, D] and fp32 logits [k, V'] from `first_kept` on."""
        drafter, layers = self._drafter, self._few_rows
        if layers is None or len(inputs_re) > MOST_ROWS:
            kept = self._hidden_of(inputs_re, rotary)[first_kept:]
            return kept, drafter.logits_of(kept).float()
        features, logits = self._cache.run(layers, inputs_re, rotary, first_kept, layers.has_head)
        kept, normed = features[first_kept:].chunk(2, dim=-1)
        return kept, logits if layers.has_head else drafter.head_logits(normed).float()

    def _hidden_of(self, inputs_re: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[R, D] of the rows of the cache's current step, before the final norm."""
        if self._few_rows is None or len(inputs_re) > MOST_ROWS:
            return self._drafter.run_layers(inputs_re.unsqueeze(0), rotary, cached_attention=self._cache)[0]
        features, _ = self._cache.run(self._few_rows, inputs_re, rotary, 0, False)
        return features.chunk(2, dim=-1)[0]

    def _make_rotary_table(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin of all positions, where they depend on the position only."""
        if not has_static_rope(self._drafter.layers_config):
            return None
        positions = torch.arange(self._cache.capacity, device=self._device).unsqueeze(0) + self._position_offset
        return self._drafter.rotary_of(torch.empty(0, device=self._device, dtype=self._drafter.dtype), positions)

    def _rotary_of(self, hidden: Tensor, where: slice | Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, R, Dh] at these places of the sequence."""
        if self._rotary_table is not None:
            cos, sin = self._rotary_table
            return cos[:, where], sin[:, where]
        places = torch.arange(where.start, where.stop, device=self._device) if isinstance(where, slice) else where
        return self._drafter.rotary_of(hidden, places.unsqueeze(0) + self._position_offset)


class ParallelDecoder(CachedDecoder):
    """The decoder of group-wise drafters with masks; see `DrafterDecoder`."""

    def __init__(self, drafter: Any, max_length_tokens: int) -> None:
        super().__init__(drafter, max_length_tokens, extra_rows=drafter.config.num_masks)
        self.columns = drafter.columns
        self._masks_ke, self._mask_residual = drafter.mask_inputs().detach(), drafter.mask_residual

    @torch.inference_mode()
    def draft(self) -> Tensor:
        """fp32 logits [G, V'] of depths 1..G after the newest committed token, from one forward over n+K rows."""
        ids, features = self._take_pending()
        layers, begin, rows = self._few_rows, self._cache.length, len(ids) + len(self._masks_ke)
        is_fused = layers is not None and layers.has_fusion and self._static is None
        if layers is not None and is_fused and rows <= MOST_ROWS and features.dtype == self._masks_ke.dtype:
            inputs = torch.cat([self._masks_ke.new_zeros(len(ids), self._masks_ke.shape[1]), self._masks_ke])
            rotary = self._rotary_of(inputs, slice(begin, begin + rows))
            logits_gv = self._cache.run_fused(layers, inputs, ids, features, rotary)
        else:
            real_ne = self._drafter.real_inputs(ids, features)
            masks_ke = self._masks_ke + real_ne[-1:] if self._mask_residual else self._masks_ke
            _, logits_gv = self._causal_logits(torch.cat([real_ne, masks_ke]), len(ids) - 1)
        # The masks' keys and values are stored after `length`: the next round overwrites them.
        self._cache.length += len(ids)
        return logits_gv


class PathDecoder:
    """A `StepwiseDecoder` over one that drafts all depths in one forward; no layer runs after `begin`.

    What the token before changes is said by `_after`.

    Args:
        decoder: Runs the one forward.
        num_depths: G.
        device: The drafter's.
    """

    one_forward = True

    def __init__(self, decoder: DrafterDecoder, num_depths: int, device: torch.device) -> None:
        self.num_depths, self.columns = num_depths, decoder.columns
        self._decoder, self._device = decoder, device
        self._newest_1 = torch.empty(0)
        self._depths: list[int] = []  # of every node

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the one forward, where it can be; what follows it is a few small operations."""
        if isinstance(self._decoder, Compilable):
            self._decoder.compile(backend)

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        self._decoder.start(prompt_ids, features, position_offset)
        self._newest_1 = prompt_ids[-1:]

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        self._decoder.observe(committed_ids, features)
        if len(committed_ids):
            self._newest_1 = committed_ids[-1:]

    @torch.inference_mode()
    def begin(self) -> Tensor:
        """fp32 logits [1, V'] of the children of the newest committed token."""
        self._draft()
        self._depths = [0]
        return self._after(self._newest_1, slice(0, 1))

    @torch.inference_mode()
    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        """fp32 logits [W, V'] of the children of W new nodes below `parents`."""
        depths = depths_below(parents, self._depths, self.num_depths, f"{self.num_depths} depths are drafted")
        self._depths += depths
        tokens_w, depths_w = to_device([tokens, depths], self._device)
        return self._after(tokens_w, depths_w)

    def _draft(self) -> None:
        """Run the one forward, and keep what `_after` reads."""
        raise NotImplementedError

    def _after(self, tokens_w: Tensor, depths_w: Tensor | slice) -> Tensor:
        """fp32 logits [W, V'] of these depths after these tokens."""
        raise NotImplementedError


class MarkovDecoder(PathDecoder):
    """Adds to the logits what the token before says of them.

    Args:
        bias_of: Tokens [W], those before, to what they add to the logits [W, V'].
    """

    def __init__(
        self, decoder: DrafterDecoder, bias_of: Callable[[Tensor], Tensor], num_depths: int, device: torch.device
    ) -> None:
        super().__init__(decoder, num_depths, device)
        self._bias_of = bias_of
        self._logits_gv = torch.empty(0)

    def _draft(self) -> None:
        self._logits_gv = self._decoder.draft()

    def _after(self, tokens_w: Tensor, depths_w: Tensor | slice) -> Tensor:
        return self._logits_gv[depths_w] + self._bias_of(tokens_w)


def depths_below(parents: list[int], depths: list[int], num_depths: int, of_them: str) -> list[int]:
    """The depths of W new nodes below `parents`, [W].

    Args:
        depths: Of the nodes there are.
        num_depths: Nodes of this depth would have no children.
        of_them: What says how many depths there are, for the error.

    Raises:
        ValueError: A parent does not exist, or nothing is drafted so deep.
    """
    if not depths or max(parents) >= len(depths):
        raise ValueError(f"parents {parents} must be among the {len(depths)} nodes there are: begin() first")
    below = [depths[parent] + 1 for parent in parents]
    if max(below) >= num_depths:
        raise ValueError(f"a node at depth {max(below)} has no children: {of_them}")
    return below


class GrowingTree:
    """The nodes of a draft tree while it grows level by level: their depths, and who sees whom.

    Node 0 is the newest committed token, which every node sees.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.parents: list[int] = []  # of the nodes 1, 2, ...: the place of the parent among these, -1 for node 0
        self.depths: list[int] = []  # of all nodes

    def begin(self) -> None:
        """Start a tree of node 0 alone."""
        self.depths, self.parents = [0], []

    def forget(self) -> None:
        """Have no tree at all, until `begin`."""
        self.depths = []

    def add(self, tokens: list[int], parents: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Add W nodes below `parents`.

        Returns:
            On the device: tokens, parents and depths [W].

        Raises:
            ValueError: A parent does not exist, or the tree grows too large.
        """
        first, end = len(self.depths), len(self.depths) + len(parents)
        if not self.depths or max(parents) >= first:
            raise ValueError(f"parents {parents} must be among the {first} nodes there are: call begin() first")
        if end > LONGEST_TREE_NODES:
            raise ValueError(f"a draft tree of {end} nodes is too large: use at most {LONGEST_TREE_NODES}")
        depths = [self.depths[parent] + 1 for parent in parents]
        self.depths += depths
        self.parents += [parent - 1 for parent in parents]
        return tuple(to_device([tokens, parents, depths], self._device))

    def seen_by_last(self, count: int) -> Tensor:
        """[W, M] bool on the device, which nodes after node 0 each of the last W sees, itself too."""
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
    """

    def __init__(self, drafter: Any, max_length_tokens: int, num_depths: int) -> None:
        super().__init__(drafter, max_length_tokens, extra_rows=LONGEST_TREE_NODES)
        self.num_depths, self.columns = num_depths, drafter.columns
        self._tree = GrowingTree(self._device)
        self._feedback_md = torch.empty(0)

    @torch.inference_mode()
    def begin(self) -> Tensor:
        """fp32 logits [1, V'] of the children of the newest committed token."""
        ids, features = self._take_pending()
        newest_1d, logits_1v = self._causal_logits(self._drafter.real_inputs(ids, features), len(ids) - 1)
        self._cache.length += len(ids)
        self._feedback_md = newest_1d
        self._tree.begin()
        return logits_1v

    @torch.inference_mode()
    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        """fp32 logits [W, V'] of the children of W new nodes below `parents`."""
        ids, parents_w, depths = self._tree.add(tokens, parents)
        above = self._feedback_md.index_select(0, parents_w)
        inputs_we = self._drafter.drafted_inputs(ids, above)
        places, nodes = depths + (self._cache.length - 1), len(tokens)
        if self._static is not None and nodes <= LONGEST_STATIC_ROWS:
            seen = self._tree.seen_by_last(nodes)
            hidden_wd, logits_wv = self._static.tree(inputs_we, places, seen, self._rotary_of)
        else:
            if self._few_rows is not None and nodes <= MOST_ROWS:
                self._cache.begin_call(nodes, self._tree.parents)
            else:
                self._cache.begin_tree_step(self._tree.seen_by_last(nodes))
            hidden_wd, logits_wv = self._run_rows(inputs_we, self._rotary_of(inputs_we, places))
        self._feedback_md = torch.cat([self._feedback_md, hidden_wd])
        return logits_wv


class StaticLayers:
    """Layers and logits, compiled: rows padded to a few numbers, attention over the whole cache.

    Padding stands after the rows that are wanted: causal order hides it from them, and the next forward overwrites it.

    Args:
        drafter: Has `run_layers` and `logits_of`, as `GroupWiseDrafter` has.
        cache: With room for `LONGEST_STATIC_ROWS` after the rows that are ever wanted.
        backend: Of `torch.compile`.
    """

    def __init__(self, drafter: Any, cache: CachedAttention, backend: str) -> None:
        self._cache, self._dtype = cache, drafter.dtype
        cache.hold_still()
        self._columns = torch.arange(cache.capacity, device=drafter.device)
        self._copies = drafter.device.type == "cuda"

        def run(
            inputs: Tensor, cos: Tensor, sin: Tensor, places: Tensor, mask: Tensor, kept: Tensor
        ) -> tuple[Tensor, Tensor]:
            cache.begin_static_step(places, mask)
            hidden = drafter.run_layers(inputs, (cos, sin), cached_attention=cache)[0].index_select(0, kept)
            cache.end_static_step()
            return hidden, drafter.logits_of(hidden).float()

        self._run = compiled(run, drafter.device, f"drafter {type(drafter).__name__}", backend)

    def causal(self, inputs_re: Tensor, first_kept: int, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """Rows that follow the cached ones in order: hidden [k, D] and fp32 logits [k, V'] from `first_kept` on."""
        begin, rows = self._cache.length, len(inputs_re)
        places = self._columns[begin : begin + padded_rows(rows)]
        kept = self._columns[first_kept:rows]
        return self._forward(inputs_re, places, places, self._columns > places[:, None], kept, rotate)

    def tree(self, inputs_we: Tensor, positions: Tensor, seen: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """New nodes of a draft tree: hidden [W, D] and fp32 logits [W, V']; seen [W, M] as in `CachedAttention`."""
        (nodes, known), size = seen.shape, padded_rows(len(inputs_we))
        begin = self._cache.length + known - nodes
        places = self._columns[begin : begin + size]
        hidden = (self._columns >= self._cache.length).expand(size, -1).clone()
        hidden[:nodes, self._cache.length : self._cache.length + known] = ~seen.to(hidden.device)
        positions = F.pad(positions, (0, size - nodes))
        kept = self._columns[:size]
        hidden_wd, logits_wv = self._forward(inputs_we, places, positions, hidden, kept, rotate)
        return hidden_wd[:nodes], logits_wv[:nodes]

    def _forward(
        self,
        inputs_re: Tensor,
        places: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kept: Tensor,
        rotate: Rotate,
    ) -> tuple[Tensor, Tensor]:
        """hidden: [R, S], what a row may not see."""
        inputs = F.pad(inputs_re, (0, 0, 0, len(places) - len(inputs_re)))[None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        # Of their own, not views: what is compiled may depend on where in a larger tensor an input begins.
        rotary = [part.clone() for part in rotate(inputs, positions)]
        results = self._run(inputs, *rotary, places.clone(), mask, kept.clone())
        # Results are kept over the next call, which on CUDA may reuse their memory.
        return tuple(result.clone() for result in results) if self._copies else results


def padded_rows(rows: int) -> int:
    """The next power of two: few shapes, and at most as much again of what costs little."""
    return 1 << (rows - 1).bit_length()
