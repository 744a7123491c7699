"""Decoder layers of the target's own kind, with only the attention core replaced by ours.

The layers are transformers' own modules, built from the target's config, so that widths, heads, biases, QK norms and
RoPE match the target. transformers lets a model name its attention function; we register one that hands queries, keys
and values to an object that the forward was given: group attention over packed rows in training (`GroupAttention`),
attention over a KV cache in decoding.

Sliding-window attention of a target is not carried over: the drafter's layers attend to the whole past.

Shapes: H heads, Hkv key/value heads, N packed rows, R rows of a decode step, Dh head size.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftsmith.models.groups.attention import group_attention
from draftsmith.models.groups.rows import Grid
from draftsmith.recipes.errors import UserError

ATTENTION_NAME = "draftsmith_group"
# Architectures whose layer takes (hidden_states, position_embeddings=(cos, sin), **kwargs): each has a test.
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "olmo2")


@dataclass
class TargetLayers:
    """Decoder layers and the final norm.

    A plain object, so that torch takes nothing that it holds for a part of a drafter.
    """

    layers: nn.ModuleList
    norm: nn.Module


# From a target's config and a number of layers to the config that they are made of.
LayersConfig = Callable[[dict[str, Any], int], PreTrainedConfig]


def layers_config(target_config: dict[str, Any], num_layers: int) -> PreTrainedConfig:
    """The target's config, cut down to this many layers of full attention and a vocabulary of one.

    Raises:
        UserError: The architecture is not supported; lists those that are.
    """
    model_type = target_config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"target architecture `{model_type}` is not supported by this drafter: use a target whose model_type is "
            f"one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    values = copy.deepcopy(target_config)
    for key in ("model_type", "layer_types", "dtype", "torch_dtype", "_name_or_path", "architectures"):
        values.pop(key, None)
    values.update(num_hidden_layers=num_layers, vocab_size=1, attention_dropout=0.0)
    values.update(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    values.update(sliding_window=None, use_sliding_window=False)
    config = AutoConfig.for_model(model_type, **values)
    config._attn_implementation = ATTENTION_NAME
    return config


def qwen3_layers_config(target_config: dict[str, Any], num_layers: int) -> PreTrainedConfig:
    """This many layers of Qwen 3's kind (q/k norms, no biases, SiLU), as wide as the target's and with its RoPE.

    RoPE that turns a part of a head's dimensions only, which Qwen 3 has not, becomes plain RoPE of the same base.

    Raises:
        UserError: The architecture is not supported; lists those that are.
    """
    source = layers_config(target_config, num_layers)
    rope = dict(getattr(source, "rope_parameters", None) or {})
    partial = rope.pop("partial_rotary_factor", 1.0) != 1.0
    if partial or rope.get("rope_type", "default") == "longrope":
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)}
    heads = source.num_attention_heads
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(source, "num_key_value_heads", None) or heads,
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // heads,
        rms_norm_eps=getattr(source, "rms_norm_eps", 1e-6),
        rope_parameters=rope or None,
        max_position_embeddings=source.max_position_embeddings,
        initializer_range=getattr(source, "initializer_range", 0.02),
        num_hidden_layers=num_layers,
        vocab_size=1,
        attention_bias=False,
        hidden_act="silu",
        use_sliding_window=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = ATTENTION_NAME
    return config


def build_target_layers(config: PreTrainedConfig) -> TargetLayers:
    """New layers from `layers_config`, initialised as transformers initialises that architecture."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
    skeleton = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.get_default_dtype())
    return TargetLayers(skeleton.layers, skeleton.norm)


class Rotary:
    """cos and sin of positions, as the target's layers take them.

    No module: RoPE has no weights. One for each drafter, as some kinds remember the longest position.
    """

    def __init__(self, module_class: Any, config: PreTrainedConfig, device: torch.device) -> None:
        self.module = module_class(config=config).to(device)

    @classmethod
    def of_target(cls, target: PreTrainedModel, config: PreTrainedConfig) -> Self:
        """Make it with the module that the target itself uses."""
        return cls(type(target.base_model.rotary_emb), config, target.device)

    def __call__(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, N, Dh] at positions [1, N], on the device and in the dtype of `hidden`."""
        return self.module(hidden, position_ids)


class Attention(Protocol):
    """The attention of a forward's layers, which may keep keys and values for later ones."""

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[1, R, H, Dh] for queries [1, H, R, Dh], keys and values [1, Hkv, R, Dh]."""


class GroupAttention:
    """Group attention over packed rows: of all depths together, or of some after those that they attend to.

    Args:
        backend: As in `group_attention`.
        grid: The rows' grid, of all depths or of the first ones.
        causal: Whether a row sees only the earlier ones of its own group.
        keeps: Whether rows of further depths follow, which attend to the keys and values of these.
    """

    def __init__(self, backend: str, grid: Grid, causal: bool = True, keeps: bool = False) -> None:
        self._backend, self._grid, self._causal, self._keeps = backend, grid, causal, keeps
        self._earlier = dict[int, list[tuple[Tensor, Tensor]]]()

    def add(self, layer_index: int, k_bhnd: Tensor, v_bhnd: Tensor) -> None:
        """Keys and values [1, Hkv, N, Dh] that further depths attend to, of rows without a query."""
        self._earlier.setdefault(layer_index, []).append((self._grid.to_grid(k_bhnd), self._grid.to_grid(v_bhnd)))

    def go_on(self, grid: Grid) -> None:
        """Go on with the rows of the next depths, on a grid of these alone."""
        self._grid = grid

    def attend(self, layer_index: int, q_bhrd: Tensor, k_bhrd: Tensor, v_bhrd: Tensor, scale: float) -> Tensor:
        """[1, N, H, Dh] for queries [1, H, N, Dh], keys and values [1, Hkv, N, Dh]."""
        grid = self._grid
        keys_values = [*self._earlier.get(layer_index, []), (grid.to_grid(k_bhrd), grid.to_grid(v_bhrd))]
        if self._keeps:
            self._earlier[layer_index] = keys_values
        k_bhgsd, v_bhgsd = (
            parts[-1] if len(parts) == 1 else torch.cat([part.to(parts[-1].dtype) for part in parts], dim=2)
            for parts in zip(*keys_values, strict=True)
        )
        q_bhqsd = grid.to_grid(q_bhrd)
        out = group_attention(q_bhqsd, k_bhgsd, v_bhgsd, self._backend, scale, grid.documents, self._causal)
        return grid.from_grid(out)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cached_attention: Attention | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, N, Dh] -> ([1, N, H, Dh], no weights)."""
    if cached_attention is None:
        raise ValueError("the drafter's layers need `cached_attention`")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cached_attention.attend(module.layer_idx, query, key, value, scale), None
