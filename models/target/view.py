"""Uniform view of a target's config: one value under one name, for the rest of the package.

Configs differ: values are in a wrapper's `text_config`, under old names (`n_layer`), in a list by layer, or by type of
layer, as for RoPE.
"""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

# Other names of values in configs that transformers does not translate: old ones, and those of models' own code.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "vocab_size": (),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx"),
}
# Values that some configs give for each layer; a drafter uses the last layer's.
BY_LAYER = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
# Width of the embedding in configs where it may differ from the layers'.
EMBEDDING_WIDTHS = ("word_embed_proj_dim", "embedding_size", "d_embed")
FULL_ATTENTION = "full_attention"


def target_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the config values of the target's text model, each under one name."""
    text = config.get_text_config()
    values = {**text.to_dict(), "model_type": text.model_type}
    for name in OTHER_NAMES:
        value = target_value(text, name)
        if values.get(name) is None and value is not None:
            values[name] = value
    for name in BY_LAYER:
        if isinstance(values.get(name), list | tuple) and values[name]:
            values[name] = values[name][-1]
    rope = flat_rope(values)
    if rope is not None:
        values["rope_parameters"] = rope
    if not values.get("architectures"):
        values["architectures"] = config.architectures
    return values


def target_value(config: PreTrainedConfig, name: str) -> Any:
    """Return the value of a key of `OTHER_NAMES`, under any of its names; None if the config has none."""
    text = config.get_text_config()
    values = (getattr(text, each, None) for each in (name, *OTHER_NAMES[name]))
    return next((value for value in values if value is not None), None)


def flat_rope(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the RoPE of layers that attend to the whole past, in transformers' form; None if the config has none."""
    rope = values.get("rope_parameters")
    if isinstance(rope, Mapping):
        by_type = {kind: value for kind, value in rope.items() if isinstance(value, Mapping) and "rope_theta" in value}
        if by_type:
            whole = [kind for kind in by_type if "sliding" not in kind and "chunked" not in kind]
            chosen = FULL_ATTENTION if FULL_ATTENTION in by_type else (whole or [*by_type])[0]
            return copy.deepcopy(dict(by_type[chosen]))
        return copy.deepcopy(dict(rope))
    theta = values.get("rope_theta")
    if theta is None:
        return None
    scaling = dict(values.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    return {"rope_theta": theta, **scaling}


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Return whether the checkpoint holds other models than the text model too, such as vision."""
    return config.get_text_config() is not config
