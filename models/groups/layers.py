"""Decoder layers of the target's own kind, or Llama's or Qwen 3's, with our attention core (`attention.attend`).

The layers are transformers' own modules, built from the target's config, so that widths, heads, biases, QK norms and
RoPE match the target. Those of another kind keep width, heads and RoPE. Sliding-window attention of a target is not
carried over: a drafter's layers attend to the whole past, or to the window that its own options give it.

Shapes: N packed query rows, Dh head size.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftsmith.errors import UserError
from draftsmith.models.groups.attention import attend

ATTENTION_NAME = "draftsmith_group"
DEFAULT_POSITIONS = 4096  # of drafters whose target counts none, as ALiBi's
# Architectures whose layer takes (hidden_states, position_embeddings=(cos, sin), **kwargs): each has a test.
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "olmo2")


Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
OTHER_KINDS: dict[str, Any] = {"llama": LlamaRotaryEmbedding, "qwen3": Qwen3RotaryEmbedding}


def layers_config(layers_of: Mapping[str, Any], num_layers: int) -> PreTrainedConfig:
    """Return a config for a drafter's layers: `num_layers` layers of full attention, and a vocabulary of one token.

    Args:
        layers_of: Config values of the layers: the target's, from `target_values`, or those from `of_kind`.

    Raises:
        UserError: The architecture is not supported; the message lists the supported ones.
    """
    model_type = layers_of.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"target architecture `{model_type}` is not supported by this drafter: take another drafter.kind, or a "
            f"target whose model_type is one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    values = copy.deepcopy(dict(layers_of))
    for key in ("model_type", "layer_types", "dtype", "torch_dtype", "_name_or_path", "architectures"):
        values.pop(key, None)
    values.update(num_hidden_layers=num_layers, vocab_size=1, attention_dropout=0.0)
    values.update(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    values.update(sliding_window=None, use_sliding_window=False)
    config = AutoConfig.for_model(model_type, **values)
    config._attn_implementation = ATTENTION_NAME
    return config


def of_kind(kind: str, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config values of dense layers for a drafter of this target.

    Args:
        kind: `target`: its own; or `llama`, or `qwen3` (with q/k norms), which have its width, heads and RoPE, SiLU and
            no biases. RoPE that turns a part of a head's dimensions only becomes plain RoPE of the same base. The MLP
            is as wide as the target's config says, or as the experts together that a token takes.
    """
    if kind == "target":
        return dict(target_config)
    source = dict(target_config)
    rope = dict(source.get("rope_parameters") or {})
    if rope.pop("partial_rotary_factor", 1.0) != 1.0 or rope.get("rope_type", "default") == "longrope":
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)}
    width, heads = source["hidden_size"], source["num_attention_heads"]
    kv_heads = source.get("num_key_value_heads") or heads
    of_experts = (source.get("num_experts_per_tok") or 1) * (source.get("moe_intermediate_size") or 0)
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": source.get("intermediate_size") or of_experts or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if heads % kv_heads else kv_heads,
        "head_dim": source.get("head_dim") or width // heads,
        "rms_norm_eps": source.get("rms_norm_eps") or 1e-6,
        "rope_parameters": rope or None,
        "max_position_embeddings": source.get("max_position_embeddings") or DEFAULT_POSITIONS,
        "initializer_range": source.get("initializer_range") or 0.02,
        "attention_bias": False,
        "hidden_act": "silu",
    }


def build_target_layers(config: PreTrainedConfig) -> tuple[nn.ModuleList, nn.Module]:
    """Make new layers and a final norm from `layers_config`, initialised as transformers does for that architecture."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend)
    skeleton = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.get_default_dtype())
    return skeleton.layers, skeleton.norm


def narrow_mlp(layer: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Return a decoder layer's weights by name, with those `width` neurons of its MLP that have the largest outputs."""
    output = layer["mlp.down_proj.weight"]
    neurons = output.shape[1]
    if width == neurons:
        return dict(layer)
    kept = output.float().norm(dim=0).topk(width).indices.sort().values
    narrow = {"mlp.down_proj.weight": output[:, kept]}
    for name, weight in layer.items():
        if name.startswith("mlp.") and not name.startswith("mlp.down_proj."):
            # Phi-3 has the gate's and the inner weights in one matrix.
            narrow[name] = weight.unflatten(0, (-1, neurons))[:, kept].flatten(0, 1)
    return {**layer, **narrow}


def build_rotary(kind: str, target: PreTrainedModel, config: PreTrainedConfig) -> Rotate:
    """Build the RoPE function of layers of this kind, for `target` the target's own.

    It maps hidden states and positions [1, N] to cos and sin [1, N, Dh], in their dtype. It is no module of the
    drafter, since RoPE has no weights; each drafter builds its own, as some kinds remember the longest position.
    """
    module_class = OTHER_KINDS.get(kind) or type(target.base_model.rotary_emb)
    return module_class(config=config).to(target.device).forward
