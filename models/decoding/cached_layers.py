"""A drafter's decoder layers over their KV cache: one call on a CPU, as they are, or compiled and recorded on CUDA.

A round's first forward reads the pending real tokens, then the K masks. All are written after the cached real tokens;
only the real ones are kept. Causal order is exactly group attention here, since the masks of the newest group come
after every real token.

Shapes: K masks, P prompt, n newly committed tokens, R rows of a forward, k of them kept, E input width of a layer, F
features, D hidden, V' columns of the logits, S columns of the cache, H heads, Dh head size.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.models.compiling import BACKEND, Graphs
from draftsmith.models.decoding.kv_cache import KVCache, additive_mask, for_device, hidden_columns
from draftsmith.models.kernels.cpu_kernels import can_attend
from draftsmith.models.kernels.cpu_layers import MOST_CALL_ROWS, CpuLayers, has_static_rope, head_size, num_kv_heads
from draftsmith.models.kernels.cuda_attention import can_split, has_split_attention, split_attention
from draftsmith.models.kernels.fused_projections import fuse_projections

STATIC_TOKENS = 16  # new tokens of a compiled forward; more, as in a prompt, are read without compilation


class CachedAttention(KVCache):
    """KV cache of a drafter's layers, with the layers' attention over it.

    `mask` [R, S] is added to the scores in the current forward; None: its rows are a sequence's first, in causal order.
    """

    def __init__(self, config: PreTrainedConfig, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(capacity)
        one = torch.empty(1, num_kv_heads(config), 1, head_size(config), device=device, dtype=dtype)
        self.allocate(config.num_hidden_layers, one, one)
        self._repeats = config.num_attention_heads // one.shape[1]
        self._splits = device.type == "cuda" and has_split_attention(device, dtype)
        self.mask: Tensor | None = None

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """Store new keys and values [1, Hkv, R, Dh]; attend with queries [1, H, R, Dh]; return [1, R, H, Dh]."""
        keys, values = self.update(self.layers[layer_index], (k_bhrd, v_bhrd))
        if self.mask is None:
            out = F.scaled_dot_product_attention(
                q_bhrd, k_bhrd, v_bhrd, is_causal=True, scale=scale, enable_gqa=self._repeats > 1
            )
            return out.transpose(1, 2)
        mask = self.mask[None, None]
        if can_attend(q_bhrd, keys, values, mask):
            return torch.ops.draftsmith.attention(q_bhrd, keys, values, mask, scale)
        if self._splits and can_split(q_bhrd, keys, values, mask):
            return split_attention(q_bhrd, keys, values, mask, scale)
        if self._repeats == 1:
            return F.scaled_dot_product_attention(q_bhrd, keys, values, self.mask, scale=scale).transpose(1, 2)
        # Key heads as the batch and the query heads that share one as its heads: no key is copied.
        q_grouped = q_bhrd[0].unflatten(0, (-1, self._repeats))
        keys, values = (part[0].unsqueeze(1).expand(-1, self._repeats, -1, -1) for part in (keys, values))
        out = F.scaled_dot_product_attention(q_grouped, keys, values, self.mask, scale=scale)
        return out.flatten(0, 1).transpose(0, 1).unsqueeze(0)


class CachedDecoder:
    """Base of decoders with a drafter's layers: holds one sequence's queued tokens, KV cache and positions.

    When compiled, all drafts run the same graph: new tokens fill the first of `STATIC_TOKENS` rows, and rows
    attend to the whole cache, of which a mask hides what they do not see. The other rows' keys and values go to the
    cache's last column, which no row sees.

    Args:
        drafter: Has `layers_config`, `reads_first_token`, `sliding_window`, `real_inputs`, `run_layers`, `rotary_of`,
            `logits_of`, as `GroupWiseDrafter` has.
        max_length_tokens: Largest number of committed tokens, the prompt included.
        extra_rows: Largest number of draft rows after them, in one forward or one tree.
        skipped: Number of first tokens without a row; None: 0 if the drafter reads its first token, else 1.
    """

    _reads_hidden = True  # whether a forward in one call returns hidden states, not logits alone

    def __init__(self, drafter: Any, max_length_tokens: int, extra_rows: int, skipped: int | None = None) -> None:
        self._drafter, self._max_length_tokens, self._device = drafter, max_length_tokens, drafter.device
        self._window, config = drafter.sliding_window, drafter.layers_config
        capacity = max_length_tokens + extra_rows + 1
        self._cache = CachedAttention(config, capacity, self._device, drafter.dtype)
        self._column_s = torch.arange(self._cache.capacity, device=self._device)
        self._masks_ke = torch.empty(0)  # rows after those of the new tokens
        self._has_residual = False  # whether masks read the newest token too
        self._skipped = int(not drafter.reads_first_token) if skipped is None else skipped
        self._pending: list[tuple[Tensor, Tensor]] = []
        # cos and sin of all positions; None if they depend on more than the position
        self._angles: tuple[Tensor, Tensor] | None = None
        if has_static_rope(config):
            empty = torch.empty(0, device=self._device, dtype=drafter.dtype)
            self._angles = drafter.rotary_of(empty, self._column_s[None] + self._skipped)
        cpu_layers = getattr(drafter, "cpu_layers", None)
        self._cpu_layers: CpuLayers | None = None if cpu_layers is None else cpu_layers()
        self._static: Graphs | None = None
        self._compiled_together: list[Graphs] = []

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the forwards of a round; call it before the first sequence. Prompts stay uncompiled.

        Nothing is compiled if RoPE's angles depend on the length, as these are in no table.
        """
        self._backend, self._is_compiled = backend, self._angles is not None
        if self._is_compiled:
            for part in itertools.chain(*self._cache.layers):  # CUDA graphs write into static memory only
                torch._dynamo.mark_static_address(part)
            fuse_projections(self._drafter)
            self._static = self._graphs(self._run_static)

    def _graphs(self, function: Callable[..., Any]) -> Graphs:
        # A separate function, as bound methods are not compiled.
        what = f"drafter {type(self._drafter).__name__}"
        return Graphs(
            lambda *inputs: function(*inputs), what, self._device, self._backend, group=self._compiled_together
        )

    # ---- a sequence ----

    def start(self, prompt_ids: Tensor, features: Tensor) -> None:
        """Start a sequence: queue its prompt, ids [P] with the target's features [P, F] AT these tokens."""
        previous = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        self._begin_sequence(prompt_ids[self._skipped :], previous[self._skipped :])

    def _begin_sequence(self, ids: Tensor, features: Tensor) -> None:
        """Forget the last sequence, and queue the first tokens and features of this one."""
        self._cache.length, self._pending = 0, [(ids, features)]
        if self._cpu_layers is not None:
            self._cpu_layers.refresh()

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Queue n >= 1 committed tokens [n], with the target's features [n, F] that predicted them."""
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
                f"{length} tokens are more than decoder(max_length_tokens={self._max_length_tokens}): make it larger"
            )
        self._pending = []
        return ids, features

    def _read_pending(self) -> tuple[Tensor, Tensor]:
        """Run the queued tokens, then the masks; hidden states [1+K, D] and fp32 logits [1+K, V'] of newest and masks.

        The masks' keys and values are stored after the committed ones: the next round overwrites them.
        """
        layers = self._cpu_layers
        ids, features = self._read_ahead(*self._take_pending())
        if self._has_graph(len(ids)):
            results = self._run_graph(ids, features)
        elif layers is not None and layers.fuses(features):
            results = self._causal(layers.fuse(ids, features), len(ids) - 1)
        else:
            inputs = self._with_masks(self._drafter.real_inputs(ids, features), slice(len(ids) - 1, len(ids)))
            results = self._causal(inputs, len(ids) - 1)
        self._cache.length += len(ids)
        return results

    def _with_masks(self, inputs_ne: Tensor, newest: Any) -> Tensor:
        """Return the inputs of new tokens, then of the masks [n+K, E]; `newest` selects the newest token's row."""
        if not len(self._masks_ke):
            return inputs_ne
        masks = self._masks_ke + inputs_ne[newest] if self._has_residual else self._masks_ke
        return torch.cat([inputs_ne, masks])

    def _read_ahead(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Run the first rows of a long prompt, `MOST_CALL_ROWS` at a time; return those that fit into one call."""
        while (more := len(ids) + len(self._masks_ke) - MOST_CALL_ROWS) > 0:
            rows = min(more, MOST_CALL_ROWS)
            if not self._is_one_call(rows):
                break
            self._causal(self._drafter.real_inputs(ids[:rows], features[:rows]), rows)
            self._cache.length += rows
            ids, features = ids[rows:], features[rows:]
        return ids, features

    # ---- a forward of the layers ----

    def _is_one_call(self, num_rows: int) -> bool:
        """Return True if rows after the cached ones are one call of `CpuLayers`."""
        return self._cpu_layers is not None and num_rows <= MOST_CALL_ROWS

    def _call(
        self,
        inputs_re: Tensor,
        rotary: tuple[Tensor, Tensor],
        first: int,
        first_kept: int,
        parents: Sequence[int] | None = None,
        sees_later: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run rows from column `first` on as `CpuLayers.forward` does; hidden [R, D] and fp32 logits [k, V']."""
        layers, cache = self._cpu_layers, self._cache
        assert layers is not None
        hidden, normed, logits = layers.forward(
            inputs_re, (rotary[0][0], rotary[1][0]), cache.keys, cache.values, first, first_kept,
            self._reads_hidden or not layers.has_head, parents, self._window, sees_later,
        )  # fmt: skip
        if not layers.has_head and first_kept < len(inputs_re):
            logits = self._drafter.head_logits(normed[first_kept:]).float()
        return hidden, logits

    def _causal(self, inputs_re: Tensor, first_kept: int) -> tuple[Tensor, Tensor]:
        """Run rows that follow the cached ones; hidden [k, D] and fp32 logits [k, V'] from `first_kept` on."""
        first, end = self._cache.length, self._cache.length + len(inputs_re)
        if self._is_one_call(len(inputs_re)):
            rotary = self._rotary_of(inputs_re, slice(first, end))
            hidden, logits = self._call(inputs_re, rotary, first, first_kept)
            return hidden[first_kept:], logits
        columns, hidden_rs = self._column_s[:end], None
        if first > 0 or self._window is not None:
            hidden_rs = hidden_columns(columns, columns[first:], first, None, self._window)
        kept = self._run_rows(inputs_re, first, slice(first, end), hidden_rs)[first_kept:]
        return kept, self._drafter.logits_of(kept).float()

    def _run_rows(
        self, inputs_re: Tensor, first: int | Tensor, positions: slice | Tensor, hidden_rs: Tensor | None
    ) -> Tensor:
        """Run rows through the layers; hidden states [R, D] before the final norm.

        Args:
            first: As in `KVCache.write_at`.
            hidden_rs: As `hidden_columns` returns it; None: the rows are a sequence's first, in causal order.
        """
        cache, rotary = self._cache, self._rotary_of(inputs_re, positions)
        cache.mask = None if hidden_rs is None else additive_mask(hidden_rs, cache.keys.dtype)
        cache.write_at(first, 0 if hidden_rs is None else hidden_rs.shape[1])
        states: Tensor = self._drafter.run_layers(inputs_re[None], rotary, cache)[0]
        cache.mask = None
        cache.write_at(0, 0)
        return states

    def _rotary_of(self, hidden: Tensor, where: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1, R, Dh] at these places of the sequence."""
        if self._angles is not None:
            cos, sin = self._angles
            return cos[:, where], sin[:, where]
        rotary: tuple[Tensor, Tensor] = self._drafter.rotary_of(hidden, self._column_s[where][None] + self._skipped)
        return rotary

    # ---- compiled ----

    def _has_graph(self, num_tokens: int) -> bool:
        """Return True if new tokens are few enough for the compiled forward, which works."""
        return self._static is not None and self._static.works and num_tokens <= STATIC_TOKENS

    def _run_graph(self, ids: Tensor, features: Tensor) -> Any:
        """Run the compiled forward of at most `STATIC_TOKENS` new tokens, as `_run_static` does."""
        assert self._static is not None
        place = for_device([self._cache.length, len(features)], self._device)
        return self._static(STATIC_TOKENS, ids, features, place)

    def _run_static(self, ids: Tensor, features: Tensor, place: Tensor) -> Any:
        """Run rows of padded tokens, then the masks, as `_read_pending` does; it is compiled.

        Args:
            place: Number of committed tokens, and of new ones.
        """
        columns, begin, count = self._column_s, place[0], place[1]
        newest, inputs = place[1:2] - 1, self._drafter.real_inputs(ids, features)
        places = torch.where(columns[: len(ids)] < count, begin + columns[: len(ids)], columns[-1])
        if num_masks := len(self._masks_ke):
            inputs = self._with_masks(inputs, newest)
            places = torch.cat([places, begin + count + columns[:num_masks]])
            newest = torch.cat([newest, len(ids) + columns[:num_masks]])
        hidden_rs = hidden_columns(columns, places, begin, None, self._window)
        kept = self._run_rows(inputs, places, places, hidden_rs).index_select(0, newest)
        return kept, self._drafter.logits_of(kept).float()
