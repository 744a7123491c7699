"""Decoding with blocks before a context of features (`drafters/dflash.py`), whose keys and values are all that is kept.

What the target says of committed tokens is made into keys and values of each layer and put behind those that are there;
then one forward over the rows of a block drafts all depths. A block's own keys and values lie behind the context's: the
next round overwrites them.

Shapes: L layers, B sequences, G depths, P prompt, n features that are new, R = block_size rows, F features, D
hidden, V columns of the logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from draftsmith.models.compiling import BACKEND, compiled
from draftsmith.models.decoding.decoders import LONGEST_STATIC_ROWS, CachedDecoder, padded_rows


class ContextLayers:
    """Keys and values of a context for all layers in one product: for one round, L small ones cost more than they do.

    Of the layers' weights as they are now, which have no biases.
    """

    def __init__(self, layers: Any) -> None:
        attention = [layer.self_attn for layer in layers]
        parts = [(each.k_proj.weight, each.v_proj.weight) for each in attention]
        self._weight = torch.cat([weight for both in parts for weight in both]).detach()
        self._norms = torch.stack([each.k_norm.weight for each in attention]).detach()[:, None, None, None]
        self._eps, self._shape = attention[0].k_norm.variance_epsilon, (len(attention), 2, -1, attention[0].head_dim)

    def __call__(self, context: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[L, 2, B, Hkv, n, Dh] from c [B, n, D] and cos and sin [B, n, Dh]; keys are rotated."""
        keys_values = F.linear(context, self._weight).unflatten(-1, self._shape).permute(2, 3, 0, 4, 1, 5)
        keys, values = keys_values.unbind(1)
        keys = F.rms_norm(keys, keys.shape[-1:], eps=self._eps) * self._norms
        cos, sin = (part.unsqueeze(1) for part in rotary)
        return torch.stack([keys * cos + rotate_half(keys) * sin, values], dim=1)


class BlockDecoder(CachedDecoder):
    """See the module's docstring and `decoders.DrafterDecoder`.

    Args:
        drafter: As `DFlashDrafter`.
        max_length_tokens: Committed tokens that fit, the prompt included.
    """

    def __init__(self, drafter: Any, max_length_tokens: int) -> None:
        super().__init__(drafter, max_length_tokens, extra_rows=drafter.config.block_size)
        self.columns = drafter.columns
        self._masks_kd, self._causal = drafter.mask_inputs().detach(), drafter.config.causal
        self._first_row = drafter.first_depth - 1
        self._to_keys_values = ContextLayers(drafter.layers)
        self._run: Any = None

    def compile(self, backend: str = BACKEND) -> None:
        """Compile what a round runs, before the first sequence; prompts are read as before."""
        # Behind the features that are new stands padding, which the block overwrites as far as it reaches.
        self._cache = self._make_cache(self._max_length_tokens + self._extra_rows + LONGEST_STATIC_ROWS)
        self._cache.hold_still()
        self._columns = torch.arange(self._cache.capacity, device=self._device)
        drafter, cache, first_row, to_keys_values = self._drafter, self._cache, self._first_row, self._to_keys_values

        def run(features: Tensor, block: Tensor, cos: Tensor, sin: Tensor, places: Tensor, mask: Tensor) -> Tensor:
            new = len(features)
            context = drafter.context_of(features).unsqueeze(0)
            cache.store_at(places[:new], to_keys_values(context, (cos[:, :new], sin[:, :new])))
            cache.begin_static_step(places[new:], mask)
            hidden = drafter.run_layers(block, (cos[:, new:], sin[:, new:]), cached_attention=cache)
            cache.end_static_step()
            return drafter.logits_of(hidden[0, first_row:]).float()

        self._run = compiled(run, self._device, f"drafter {type(drafter).__name__}", backend)

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        self._cache.length = 0
        self._pending, self._position_offset = [(prompt_ids, features[:-1])], position_offset
        self._rotary_table = self._make_rotary_table()

    @torch.inference_mode()
    def draft(self) -> Tensor:
        """fp32 logits [G, V] of depths 1..G after the newest committed token, from one forward over R rows."""
        ids, features = self._take_pending()
        block = self._drafter.block_inputs(ids[-1:], self._masks_kd)
        if self._run is not None and len(features) <= LONGEST_STATIC_ROWS:
            return self._static_logits(features, block)
        new, rows, begin = len(features), block.shape[1], self._cache.length
        cos, sin = self._rotary_of(block, slice(begin, begin + new + rows))
        if new:
            context = self._drafter.context_of(features).unsqueeze(0)
            self._cache.append(self._to_keys_values(context, (cos[:, :new], sin[:, :new])))
        self._cache.begin_step(rows, self._causal)
        rotary = cos[:, new:], sin[:, new:]
        hidden = self._drafter.run_layers(block, rotary, cached_attention=self._cache)
        return self._drafter.logits_of(hidden[0, self._first_row :]).float()

    def _static_logits(self, features: Tensor, block: Tensor) -> Tensor:
        new, rows, begin = len(features), block.shape[1], self._cache.length
        padded = padded_rows(max(new, 1))
        self._cache.length = end = begin + new
        places = torch.cat([self._columns[begin : begin + padded], self._columns[end : end + rows]])
        last_r = places[padded:] if self._causal else places[-1:]
        hidden = (self._columns > last_r[:, None]).expand(rows, -1)
        mask = torch.zeros(hidden.shape, dtype=block.dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        # Of their own, not views: what is compiled may depend on where in a larger tensor an input begins.
        rotary = [part.clone() for part in self._rotary_of(block, places)]
        logits = self._run(F.pad(features, (0, 0, 0, padded - new)), block, *rotary, places, mask)
        # Kept over the next call, which on CUDA may reuse its memory.
        return logits.clone() if self._device.type == "cuda" else logits
