"""Decoder layers in one call on a CPU, for targets and drafters: `DecoderLayers` of `cpu_layers.h`.

A step of decoding is some hundred small operations, whose calls take longer than their arithmetic. For the layers of
Llama, Mistral, Qwen 2 and Qwen 3, packed by `pack_linears`, one call runs them all, with final norm and LM head. A
prompt is read in several calls of at most `MOST_CALL_ROWS` rows. Other layers and other dtypes run as they are.

Shapes: R rows, R' of them with logits, E width that comes in, D hidden, L layers, G key-value heads, S
columns of the cache, H head size, A angles of RoPE, V vocabulary, K masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftsmith.models.kernels.cpu_kernels import MOST_VECTORS, PackedLinear
from draftsmith.models.kernels.cpu_library import vector_lanes

# transformers' classes that `cpu_layers.h` computes, by their model type.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# Types of RoPE whose angles depend only on the position, so that a table of them can be computed once.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MOST_CALL_ROWS = 256  # of one call: their inputs stay in a core's cache, and each weight is read once for all of them
FINAL = -1  # feature layers, as in `FeatureTap`: after the final norm
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def has_static_rope(config: Any) -> bool:
    """Return True if the angles of a config's RoPE depend on the position only."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") in STATIC_ROPE_TYPES


class CpuLayers:
    """Decoder layers, final norm and LM head, run in one call of `cpu_layers.h`; built by `of`.

    Args:
        layers: Decoder layers. The first may have a method `attention_input`, see `forward`.
        norm: The final norm.
        head: The LM head, packed; None: there are no logits.
        config: The layers' config.
    """

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module, head: PackedLinear | None, config: Any) -> None:
        self._norm: Any = norm
        self._layers, self._head, self.config = layers, head, config
        self.has_head, self.num_layers = head is not None, len(layers)
        self.dtype: torch.dtype = _linears(layers[0])[0].weight.dtype
        self.native: Any = None
        self._made_of: list[int] = []
        self._fusion: tuple[PackedLinear, list[nn.RMSNorm], nn.Embedding | None, Tensor, bool] | None = None
        self._first_input = getattr(layers[0], "attention_input", None)
        if self._first_input is None and _norms(layers[0])[0] is None:  # EAGLE's
            self._first_input = lambda inputs: (inputs, inputs)
        self.refresh()

    @classmethod
    def of(cls, layers: Sequence[nn.Module], norm: nn.Module, head: nn.Module | None, config: Any) -> CpuLayers | None:
        """Build a `CpuLayers`; None if `cpu_layers.h` does not support these layers.

        Args:
            head: LM head; ignored if it is not packed, or of another dtype.
        """
        has_norm = is_of_family(norm, "RMSNorm")
        if not layers or not all(_is_covered(layer, config) for layer in layers) or not (has_norm or _is_none(norm)):
            return None
        if any(_norms(layer)[0] is None for layer in layers[1:]):
            return None
        linears = [linear for layer in layers for linear in _linears(layer)]
        dtype, lanes = linears[0].weight.dtype, vector_lanes()
        size = head_size(config)
        norms = [each for layer in layers for each in _norms(layer) if each is not None] + [norm] * has_norm
        one_dtype = all(each.weight.dtype == dtype for each in (*linears, *norms))
        if not lanes or size % lanes or size > MOST_VECTORS * lanes or not one_dtype:
            return None
        is_usable = isinstance(head, PackedLinear) and head.weight.dtype == dtype
        return cls(layers, norm, cast(PackedLinear, head) if is_usable else None, config)

    def set_fusion(
        self, linear: nn.Linear, norms: list[nn.RMSNorm], embedding: nn.Module | None, masks: Tensor, adds_last: bool
    ) -> None:
        """Set the modules with which `fuse` computes the layers' inputs: norms, concatenation, linear layer, masks.

        Nothing is set if a tensor has another dtype than the layers, or the linear layer is not packed.

        Args:
            linear: Projects the concatenated parts, the token's embedding (if any) and features, each D wide, to D.
            norms: The norm of each part, in that order.
            masks: Inputs [K, D] of the K [MASK]s that follow the newest token.
            adds_last: Add the newest token's input to those of the masks (`mask_residual`).
        """
        is_known = embedding is None or type(embedding) is nn.Embedding
        modules: list[Any] = [linear, *norms, *([] if embedding is None else [embedding])]
        dtypes = {masks.dtype, self.dtype, *(module.weight.dtype for module in modules)}
        if isinstance(linear, PackedLinear) and is_known and len(dtypes) == 1:
            self._fusion = linear, norms, cast("nn.Embedding | None", embedding), masks.detach(), adds_last

    def fuses(self, features: Tensor) -> bool:
        """Return True if `fuse` is set up, and takes features of this dtype."""
        return self._fusion is not None and features.dtype == self.dtype

    def fuse(self, ids: Tensor, features: Tensor) -> Tensor:
        """Compute the layers' inputs [n + K, D]: of n tokens [n] with features [n, F], then of the K masks."""
        assert self._fusion is not None
        linear, norms, embedding, masks, adds_last = self._fusion
        linear.pack()
        return cast(Tensor, torch.ops.draftsmith.fuse(
            ids, None if embedding is None else embedding.weight, features, [norm.weight for norm in norms],
            norms[0].eps, linear.packed, linear.packed_bias, masks, adds_last,
        ))  # fmt: skip

    def refresh(self) -> None:
        """Build the C++ layers again if weights changed; called before each sequence."""
        linears = [linear for layer in self._layers for linear in _linears(layer)]
        linears += [] if self._head is None else [self._head]
        norms = [norm for layer in self._layers for norm in _norms(layer) if norm is not None]
        norms += [] if _is_none(self._norm) else [self._norm]
        for linear in linears:
            linear.pack()
        made_of = [*(id(linear.packed) for linear in linears), *(norm.weight.data_ptr() for norm in norms)]
        if made_of != self._made_of:
            self._made_of, self.native = made_of, self._build()

    def forward(
        self,
        inputs: Tensor,
        rotary: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        start: int,
        first_kept: int,
        reads_hidden: bool,
        parents: Sequence[int] | None = None,
        window: int | None = None,
        sees_later: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run R rows (new tokens) through all layers; write their keys and values into the KV cache.

        Args:
            inputs: [R, input width], in the layers' dtype. A method `attention_input` of the first layer, if any,
                maps them to the residual stream [R, hidden size] and to the input of its projections.
            rotary: RoPE's cos and sin [R, number of angles].
            keys, values: The cache, [layers, 1, key-value heads, columns, head size].
            start: Column of the cache for the first row; the other rows follow it.
            first_kept: The first row to return logits of, if there is an LM head.
            reads_hidden: Whether hidden states are returned; if not, the last layer leaves out earlier rows.
            parents: Parent of each node of a draft tree, -1 for none; the last R nodes are the rows. A row sees all
                columns before the tree, its ancestors and itself. None: a row sees all rows before it.
            window: Number of positions that a row sees, its own included; None: all.
            sees_later: Whether a row sees the rows after it too.

        Returns:
            Hidden states [R, hidden size] before and after the final norm; fp32 logits [R', V], empty without a head.
        """
        read = None
        if self._first_input is not None:
            inputs, read = self._first_input(inputs)
        with_logits = self.has_head and first_kept < len(inputs)
        taps = [self.num_layers, FINAL] if reads_hidden else []
        states, logits = self.native.forward(
            inputs.contiguous(), None, *rotary, None, keys, values, start, None if parents is None else list(parents),
            window or 0, sees_later, read, taps, first_kept, with_logits, True,
        )  # fmt: skip
        return *states.tensor_split(2, dim=-1), logits

    def _build(self) -> Any:
        """Build the C++ object from the layers' current weights."""
        config = self.config
        attention: Any = self._layers[0].self_attn
        native = torch.classes.draftsmith.DecoderLayers(
            config.num_attention_heads, num_kv_heads(config), head_size(config), config.hidden_size,
            config.rms_norm_eps, float(attention.scaling),
        )  # fmt: skip
        for layer in self._layers:
            linears, norms = _linears(layer), [None if norm is None else norm.weight.detach() for norm in _norms(layer)]
            native.add_layer(
                [linear.packed for linear in linears],
                [linear.packed_bias for linear in linears],
                norms,
                linears[0].in_features,
                linears[PROJECTIONS.index("gate_proj")].out_features,
            )
        head = self._head
        packed, bias, outputs = (None, None, 0) if head is None else (head.packed, head.packed_bias, head.out_features)
        native.set_head(None if _is_none(self._norm) else self._norm.weight.detach(), packed, bias, outputs)
        return native


class CpuTarget:
    """A causal language model whose forward is one C++ call on a CPU; made by `of`.

    Args:
        layers: The target's layers, final norm and LM head.
        decoder: The module with its embedding and RoPE.
        positions: Number of positions to compute RoPE's angles for.
    """

    def __init__(self, layers: CpuLayers, decoder: Any, positions: int) -> None:
        self._layers, self._embedding = layers, decoder.embed_tokens
        self.num_layers, self.positions = layers.num_layers, positions
        like = self._embedding.weight
        with torch.no_grad():
            angles = decoder.rotary_emb(like.new_empty(0), torch.arange(positions)[None])
        cos, sin = (part[0].to(like.dtype).contiguous() for part in angles)
        self._angles = cos, sin

    def refresh(self) -> None:
        """Build the C++ layers again if weights changed; called before each sequence."""
        self._layers.refresh()

    def allocate(self, cache: Any) -> None:
        """Allocate the memory of a `KVCache` for these layers."""
        one = self._embedding.weight.new_empty(self._cache_shape(1))
        cache.allocate(self.num_layers, one, one)

    def _cache_shape(self, columns: int) -> tuple[int, int, int, int]:
        """Return the shape [1, G, S, H] of a layer's keys."""
        config = self._layers.config
        return 1, num_kv_heads(config), columns, head_size(config)

    @classmethod
    def of(
        cls, target: Any, positions: int, features_only: bool = False, num_layers: int | None = None
    ) -> CpuTarget | None:
        """Return the `CpuTarget`; None if `cpu_layers.h` does not support the target, or its layers are not packed.

        Args:
            features_only: Leave the LM head out.
            num_layers: Use only this many of the first layers; None: all.
        """
        decoder: Any = target.base_model
        known = is_of_family(target, "ForCausalLM") and is_of_family(decoder, "Model")
        if not known or not has_static_rope(target.config) or not isinstance(target.lm_head, PackedLinear):
            return None
        head = None if features_only else target.lm_head
        layers = CpuLayers.of(decoder.layers[:num_layers], decoder.norm, head, target.config)
        if layers is None or layers.has_head is features_only:
            return None
        return cls(layers, decoder, positions) if decoder.embed_tokens.weight.dtype == layers.dtype else None

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        keys: Tensor | None,
        values: Tensor | None,
        start: int,
        taps: Sequence[int],
        parents: Sequence[int] | None = None,
        window: int | None = None,
        first_kept: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Run N tokens at these positions; other arguments as in `CpuLayers.forward`.

        Args:
            taps: Feature layers, as in `FeatureTap`.

        Returns:
            Logits [N - first_kept, V], empty without an LM head, and features [N, F].
        """
        features, logits = self._layers.native.forward(
            self._embedding.weight.detach(), list(tokens), *self._angles, list(positions), keys, values, start,
            None if parents is None else list(parents), window or 0, False, None, list(taps), first_kept,
            self._layers.has_head, False,
        )  # fmt: skip
        return logits, features

    def features(self, tokens: Sequence[int], positions: Sequence[int], taps: Sequence[int]) -> Tensor:
        """Return the features [N, F] of a document's tokens, read in calls of at most `MOST_CALL_ROWS` rows."""
        weight = self._embedding.weight
        keys, values = weight.new_empty(2, self.num_layers, *self._cache_shape(len(tokens)))
        features = weight.new_empty(len(tokens), len(taps) * weight.shape[1])
        for start in range(0, len(tokens), MOST_CALL_ROWS):
            rows = slice(start, start + MOST_CALL_ROWS)
            some = tokens[rows]
            _, features[rows] = self.forward(some, positions[rows], keys, values, start, taps, first_kept=len(some))
        return features


def _is_covered(layer: Any, config: Any) -> bool:
    """Return True if `cpu_layers.h` computes a layer: its class and activation, and packed weights."""
    is_known = is_of_family(layer, "DecoderLayer") or hasattr(layer, "attention_input")
    if not is_known or getattr(config, "hidden_act", None) != "silu":
        return False
    known_parts = is_of_family(layer.self_attn, "Attention") and is_of_family(layer.mlp, "MLP")
    return known_parts and all(isinstance(linear, PackedLinear) for linear in _linears(layer))


def is_of_family(module: Any, part: str) -> bool:
    """Return True if a module's class is exactly transformers' `part` (such as "MLP") of a supported family."""
    kind = type(module)
    return any(
        kind.__name__ == name + part and kind.__module__ == f"transformers.models.{family}.modeling_{family}"
        for family, name in FAMILIES.items()
    )


def _linears(layer: Any) -> list[Any]:
    """Return the projections of attention and MLP, in the order of `PROJECTIONS`."""
    modules = itertools.chain(layer.self_attn.named_children(), layer.mlp.named_children())
    found = dict(modules)
    return [found.get(name) for name in PROJECTIONS]


def _norms(layer: Any) -> list[Any]:
    """Return the norms before attention and MLP, of queries and of keys; None for a missing one."""
    attention, is_first = layer.self_attn, hasattr(layer, "attention_input")
    before = None if is_first or _is_none(layer.input_layernorm) else layer.input_layernorm
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return [before, layer.post_attention_layernorm, *norms]


def _is_none(norm: nn.Module) -> bool:
    return isinstance(norm, nn.Identity)


def head_size(config: Any) -> int:
    """Return the size of an attention head of layers with this config."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def num_kv_heads(config: Any) -> int:
    """Return the number of key-value heads of layers with this config."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
