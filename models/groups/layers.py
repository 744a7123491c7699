"""Decoder layers of the target's own kind, with only the attention core replaced by ours (`attention.attend`).

The layers are transformers' own modules, built from the target's config, so that widths, heads, biases, QK norms and
RoPE match the target. Sliding-window attention of a target is not carried over: the drafter's layers attend to the
whole past.

Shapes: N packed rows, Dh head size.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftsmith.models.groups.attention import attend
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


Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# From a target's config and a number of layers to the config that they are made of.
LayersConfig = Callable[[dict[str, Any], int], PreTrainedConfig]


def layers_config(target_config: dict[str, Any], num_layers: int) -> PreTrainedConfig:
    """Return the target's config, cut down to this many layers of full attention and a vocabulary of one.

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
    """Return a config of layers of Qwen 3's kind (q/k norms, no biases, SiLU), with the target's width and RoPE.

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
    """Make new layers from `layers_config`, initialised as transformers initialises that architecture."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend)
    skeleton = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.get_default_dtype())
    return TargetLayers(skeleton.layers, skeleton.norm)


def rotary_of_target(target: PreTrainedModel, config: PreTrainedConfig) -> Rotate:
    """Make RoPE as the target itself does it; see `rotary`."""
    return rotary(type(target.base_model.rotary_emb), config, target.device)


def rotary(module_class: Any, config: PreTrainedConfig, device: torch.device) -> Rotate:
    """Make the function from hidden states and positions [1, N] to cos and sin [1, N, Dh], in their dtype.

    No module of a drafter, as RoPE has no weights. One for each drafter, as some kinds remember the longest position.
    """
    return module_class(config=config).to(device).forward
