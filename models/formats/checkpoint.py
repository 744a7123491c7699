"""What a layout is made of, and the config keys of decoder layers that all of them share.

A layout turns a drafter into a `Checkpoint` and back into `Parameters`. Configs are written in Llama's keys, in which
every reader of these layouts looks for them; old readers find RoPE under its old keys too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from draftsmith.models.base.drafter import Drafter, DrafterConfig
from draftsmith.models.groups.layers import SUPPORTED_MODEL_TYPES, LayersConfig, layers_config
from draftsmith.recipes.errors import UserError

# Layers that Llama's classes run: Mistral's and Qwen 2's differ from Llama's in sliding windows, which drafters do not
# have, and in biases.
LLAMA_LIKE = ("llama", "mistral", "qwen2")
# What a drafter's layers take from the target, and what a foreign config may not say otherwise.
LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "initializer_range",
)  # fmt: skip
HARMLESS_KEYS = ("max_position_embeddings", "initializer_range")


@dataclass
class Checkpoint:
    """`config.json` and tensors by name, as a reader wants them."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass
class Parameters:
    """Our kind of drafter, its options, and its state.

    borrowed: Tensors that our drafters take from the target, by name (`embed_tokens`, `lm_head`): must be the target's,
        the head's rows those of the state's `d2t` where it has one.
    other_row: Of that embedding, the mask token's, which is the drafter's own.
    """

    kind: str
    options: dict[str, Any]
    state: dict[str, Tensor]
    borrowed: dict[str, Tensor] = field(default_factory=dict)
    other_row: int | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a layout cannot express a drafter, and the recipe line that would make it expressible."""

    why: str
    recipe_line: str

    def sentence(self) -> str:
        return f"{self.why}: train with {self.recipe_line}"


def layer_values(config: DrafterConfig, num_layers: int, layers: LayersConfig = layers_config) -> dict[str, Any]:
    """Config keys of the drafter's decoder layers, in Llama's names. layers: What they are made as."""
    source = layers(config.target_config, num_layers)
    values = {key: getattr(source, key, None) for key in LAYER_KEYS}
    values["head_dim"] = values["head_dim"] or source.hidden_size // source.num_attention_heads
    values["attention_bias"] = source.model_type == "qwen2" or bool(getattr(source, "attention_bias", False))
    values["mlp_bias"] = bool(getattr(source, "mlp_bias", False))
    return values


def llama_config(
    config: DrafterConfig, num_layers: int, dtype: str, layers: LayersConfig = layers_config
) -> dict[str, Any]:
    """`config.json` of `num_layers` layers of the drafter's kind, with the target's vocabulary and no tied head."""
    values = layer_values(config, num_layers, layers)
    rope = dict(values["rope_parameters"] or {})
    scaled = rope.get("rope_type", "default") != "default"
    return {
        "model_type": "qwen3" if config.target_config["model_type"] == "qwen3" else "llama",
        **values,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"} if scaled else None,
        "num_hidden_layers": num_layers,
        "vocab_size": config.target_config["vocab_size"],
        "tie_word_embeddings": False,
        **{key: config.target_config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def with_output_biases(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Qwen 2 has no bias behind its attention, Llama's classes have one if they have any: zeros."""
    if not config["attention_bias"]:
        return tensors
    missing = {
        name.removesuffix("weight") + "bias": weight.new_zeros(len(weight))
        for name, weight in tensors.items()
        if name.endswith("self_attn.o_proj.weight")
    }
    return {**missing, **tensors}


def without_zero_biases(state: dict[str, Tensor], target_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Undo `with_output_biases`."""
    if target_config["model_type"] != "qwen2":
        return state
    return {name: value for name, value in state.items() if not name.endswith("o_proj.bias") or value.any()}


def take_borrowed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take embedding and head out of a state; returns them by name."""
    names = ("embed_tokens", "lm_head")
    return {name: state.pop(f"{name}.weight") for name in names if f"{name}.weight" in state}


def drafted_ids(d2t: Tensor) -> Tensor:
    """[W] ids in the target's vocabulary, from offsets [W]."""
    return d2t + torch.arange(len(d2t))


def drafted_of_all(d2t: Tensor, vocabulary: int) -> Tensor:
    """[V], the `t2d` of offsets [W]."""
    t2d = torch.zeros(vocabulary, dtype=torch.bool)
    t2d[drafted_ids(d2t)] = True
    return t2d


def dtype_name(drafter: Drafter) -> str:
    """`float32` and the like."""
    return str(drafter.dtype).removeprefix("torch.")


def config_differences(
    config: Mapping[str, Any],
    target_config: Mapping[str, Any],
    exactly: bool,
    layers: LayersConfig = layers_config,
) -> list[str]:
    """Where a config, as transformers reads it, says something else of its layers than the target's does.

    Args:
        exactly: Also keys that no output of ours depends on: the number of positions, the initial values' range.
        layers: What our layers for such a target are made as.
    """
    ours = layers(dict(target_config), 1)
    model_type = config.get("model_type")
    values = {key: config[key] for key in (*LAYER_KEYS, "rope_theta", "rope_scaling") if config.get(key) is not None}
    theirs = AutoConfig.for_model(model_type if model_type in SUPPORTED_MODEL_TYPES else "llama", **values)
    found = []
    for key in LAYER_KEYS:
        wanted, value = getattr(ours, key, None), getattr(theirs, key, None)
        if key == "head_dim":
            wanted = wanted or ours.hidden_size // ours.num_attention_heads
            value = value or theirs.hidden_size // theirs.num_attention_heads
        if key == "rope_parameters":
            wanted, value = ({k: v for k, v in (side or {}).items() if v is not None} for side in (wanted, value))
        if value != wanted and (exactly or key not in HARMLESS_KEYS):
            found.append(f"{key} is {value} where the target's layers have {wanted}")
    if config.get("vocab_size") != target_config["vocab_size"]:
        found.append(f"vocab_size is {config.get('vocab_size')} where the target has {target_config['vocab_size']}")
    return found


def refuse_other_layers(
    config: Mapping[str, Any], target_config: Mapping[str, Any], layers: LayersConfig = layers_config
) -> None:
    """
    Raises:
        UserError: The layers of a foreign config are not of the target's shape, the only one that our drafters have.
    """
    differences = config_differences(config, target_config, exactly=False, layers=layers)
    if differences:
        raise UserError(
            f"the checkpoint's {differences[0]}: drafters here have layers of the target's shape, so import one "
            "that was made for this target and has them"
        )
