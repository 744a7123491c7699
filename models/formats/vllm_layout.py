"""Checkpoints of parallel drafters for vLLM with draftsmith's plugin: all options that decoding has.

`vllm_parallel.py` loads them and says what each part is for. Names are the drafter's own but for `fuse`, which is
split into the embedding's and the features' columns, and norms and the Markov head, which have shorter names. The
final norm of the target is copied for features behind it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.layout import (
    Exporter,
    Refusal,
    borrowed_head,
    dtype_name,
    has_uncapped_logits,
    llama_config,
    no_layers_but,
    no_scaled_embeddings,
    renamed,
    window_keys,
    with_output_biases,
)
from draftsmith.models.formats.reading import (
    LLAMA_LIKE,
    Checkpoint,
    Parameters,
    all_tokens,
    read_draft_vocabulary,
    read_layers,
    take_borrowed,
    window_of,
    without_zero_biases,
)
from draftsmith.models.formats.vllm_plugin import ARCHITECTURE
from draftsmith.models.groups.layers import of_kind
from draftsmith.models.target.features import FINAL_FEATURES

# Options that the config has under their own names.
OPTIONS = ("inputs", "num_masks", "shared_mask", "mask_residual", "markov_rank", "feature_layers", "first_token")
# A target's values that vLLM's must equal.
TARGET_KEYS = ("hidden_size", "num_hidden_layers", "vocab_size")
SHORT_NAMES = {
    "feature_norm.weight": "feature_norm",
    "embedding_norm.weight": "embedding_norm",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
}
RULES = (
    no_scaled_embeddings("and the plugin's layers do not"),
    no_layers_but((*LLAMA_LIKE, "qwen3"), "the plugin does not run {config.layers_of[model_type]}'s layers"),
    Refusal(
        "no masks", lambda config: not config.num_masks, "without masks it is a draft model", "drafter.kind=draft_model"
    ),
)  # fmt: skip


def needs_target(config: DrafterConfig) -> bool:
    """Return whether the checkpoint has tensors of the target: its final norm, or rows of its LM head."""
    reads_final = config.inputs != "embedding" and FINAL_FEATURES in config.feature_layers
    return reads_final or (config.draft_vocab_size is not None and not config.has_own_heads)


def to_vllm(drafter: Drafter) -> Checkpoint:
    """Convert a parallel drafter to the layout of the vLLM plugin; attach it first if `needs_target`."""
    ours = drafter.config
    layers = [] if ours.inputs == "embedding" else list(ours.feature_layers)
    last = ours.target_config["num_hidden_layers"]
    depths = [last if layer == FINAL_FEATURES else layer for layer in layers]
    captured = sorted(set(depths)) or [last]
    config = llama_config(ours, len(drafter.layers), dtype_name(drafter))
    width, heads, vocabulary = config["hidden_size"], config["num_attention_heads"], config["vocab_size"]
    config |= {
        "architectures": [ARCHITECTURE],
        "layer_kind": "qwen3" if config["model_type"] == "qwen3" else "llama",
        "layer_width": width,
        "hidden_size": width + heads,  # one more would do, but it must be a multiple of the heads
        "pard_token": vocabulary,
        "draft_vocab_size": ours.draft_vocab_size or vocabulary,
        "eagle_aux_hidden_state_layer_ids": captured,
        "num_aux_hidden_states": len(captured),
        "features": [
            [captured.index(depth), layer == FINAL_FEATURES] for depth, layer in zip(depths, layers, strict=True)
        ],
        "target": {key: ours.target_config[key] for key in TARGET_KEYS},
        **{option: getattr(ours, option) for option in OPTIONS},
        **(window_keys(ours, len(drafter.layers)) if ours.sliding_window is not None else {}),
    }
    tensors = renamed(drafter.state_dict(), SHORT_NAMES)
    tensors["masks"] = drafter.mask_inputs()
    if layers:
        of_embedding = width if ours.inputs == "both" else 0
        fuse = tensors.pop("fuse.weight")
        tensors["fuse_features.weight"] = fuse[:, of_embedding:]
        if of_embedding:
            tensors["fuse_embedding.weight"] = fuse[:, :of_embedding]
    if FINAL_FEATURES in layers:
        norm = drafter.attached.target.base_model.norm
        tensors["target_norm.weight"] = norm.weight.detach().to(drafter.dtype)
        config["target_norm_eps"] = norm.variance_epsilon
    if ours.draft_vocab_size is not None and "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = borrowed_head(drafter, "drafter.options.draft_vocab_size=null")
    return Checkpoint(config, with_output_biases(tensors, config))


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Convert back into our parameters a checkpoint that `to_vllm` wrote.

    Raises:
        UserError: The checkpoint was made for a target of another shape.
    """
    keys = checkpoint.keys
    kind, own, assumed = read_layers(checkpoint, target_config, with_own_width=True)
    state = renamed(checkpoint.tensors, SHORT_NAMES, back=True)
    state = without_zero_biases(state, of_kind(kind, target_config))
    state.pop("target_norm.weight", None)
    parts = ("fuse_embedding.weight", "fuse_features.weight")
    names = [name for name in parts if name in state and state[name].ndim == 2]
    if len({(len(state[name]), state[name].dtype) for name in names}) == 1:  # others are reported by name
        state["fuse.weight"] = torch.cat([state.pop(name) for name in names], dim=1)
    if keys.flag("shared_mask") and "masks" in state and state["masks"].ndim:
        state["masks"] = state["masks"][:1]
    options = {"num_layers": keys.whole("num_hidden_layers", 1), "layers": kind, **own}
    options |= {option: keys[option] for option in OPTIONS if option in keys}
    options["markov_rank"] = keys.whole("markov_rank") if "markov_rank" in keys else 0
    options["sliding_window"] = window_of(keys)
    if "d2t" in state:
        drafted = read_draft_vocabulary(state, keys, target_config["vocab_size"])
        options["draft_vocab_size"] = drafted or target_config["vocab_size"]
        state |= all_tokens(options["draft_vocab_size"]) if drafted is None else {}
    borrowed = take_borrowed(state)
    return Parameters("parallel", options, state, borrowed, assumed=assumed)


EXPORTERS = {
    ("parallel", "vllm"): Exporter(
        to_vllm,
        parameters,
        RULES,
        "eagle3",
        parallel=True,
        needs_target=needs_target,
        logits_fit=has_uncapped_logits,
        by_plugin=True,
    ),
}
