"""A target whose forwards are one call on a CPU, see `cpu_layers`.

Shapes: R rows, L layers, G key-value heads, S columns of the cache, H head size, T taps, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.cpu_kernels import PackedLinear
from draftsmith.models.cpu_layers import CpuLayers, has_static_rope, head_size, is_of_family, num_kv_heads
from draftsmith.models.target.features import get_text_decoder


class CpuTarget:
    """A causal language model whose forwards are one call; made by `of`.

    Args:
        layers: The target's layers, final norm and LM head.
        decoder: The module with its embedding and RoPE.
        positions: Number of positions to compute RoPE's angles for.
    """

    def __init__(self, layers: CpuLayers, decoder: Any, positions: int) -> None:
        self._layers, self._embedding = layers, decoder.embed_tokens
        like = self._embedding.weight
        with torch.no_grad():
            angles = decoder.rotary_emb(like.new_empty(0), torch.arange(positions)[None])
        cos, sin = (part[0].to(like.dtype).contiguous() for part in angles)
        self._angles = cos, sin
        self.refresh()

    def refresh(self) -> None:
        """Read the weights again if they changed; called before a sequence."""
        self._layers.refresh(self._angles, self._embedding.weight.detach())

    def allocate(self, cache: Any) -> None:
        """Allocate the memory of a `KVCache` for these layers."""
        config = self._layers.config
        one = self._embedding.weight.new_empty(1, num_kv_heads(config), 1, head_size(config))
        cache.allocate(self._layers.num_layers, one, one)

    @classmethod
    def of(cls, target: Any, positions: int) -> CpuTarget | None:
        """Return the `CpuTarget`; None if `cpu_layers.h` does not support the target, or its layers are not packed."""
        decoder: Any = get_text_decoder(target)
        known = is_of_family(target, "ForCausalLM") and is_of_family(decoder, "Model")
        if not known or not has_static_rope(target.config) or not isinstance(target.lm_head, PackedLinear):
            return None
        layers = CpuLayers.of(decoder.layers, decoder.norm, target.lm_head, target.config)
        if layers is None or not layers.has_head or decoder.embed_tokens.weight.dtype != target.lm_head.weight.dtype:
            return None
        return cls(layers, decoder, positions)

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        keys: Tensor | None,
        values: Tensor | None,
        start: int,
        taps: Sequence[int],
        mask: Tensor | None = None,
        parents: Sequence[int] | None = None,
        places: Tensor | None = None,
        first_kept: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Run R tokens at these positions; see `CpuLayers.forward`.

        Args:
            places: [R] cache columns of the rows, in place of `start`; these need a mask.
            first_kept: The first row to return logits of.

        Returns:
            Features [R, T * D] and logits [R - first_kept, V].
        """
        found: tuple[Tensor, Tensor] = self._layers.native.forward_tokens(
            list(tokens), list(positions), keys, values, start, places, mask,
            None if parents is None else list(parents), list(taps), first_kept,
        )  # fmt: skip
        return found
