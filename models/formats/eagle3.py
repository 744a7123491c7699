"""EAGLE-3's layout, for both of its shapes: `eagle3`, and `peagle` with its mask.

Ours is this layout but for one name: the first layer is `midlayer` there, `layers.0` here. `d2t` are offsets in both,
`t2d` is written for the authors' code and ignored by engines. Engines count the fused layers in their own ways: vLLM's
ids are ours (0 the embeddings), SGLang's are one less and stand in `eagle_config`.

Shapes: W drafted tokens, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftsmith.models.base.drafter import Drafter, DrafterConfig
from draftsmith.models.formats.checkpoint import (
    LLAMA_LIKE,
    Checkpoint,
    Parameters,
    Refusal,
    drafted_of_all,
    dtype_name,
    llama_config,
    refuse_other_layers,
    take_borrowed,
    with_output_biases,
    without_zero_biases,
)
from draftsmith.models.formats.loader_rules import MASK_TOKEN_KEYS, LoaderRules, TensorRule, llama_layer
from draftsmith.recipes.errors import UserError

# EAGLE-3.1's and their relatives: keys of the options, and of engines' configs.
NORMS = ("fc_norm", "norm_before_fc", "norm_output")
FIRST_LAYER = llama_layer("midlayer", "2*H", ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
FURTHER_LAYERS = llama_layer("layers.{i}", "H", ("input_layernorm", "post_attention_layernorm"), ((1, "layers"),))
COMMON = (TensorRule("fc.weight", ("H", "A*T")), TensorRule("norm.weight", ("H",)))
FEATURE_NORMS = (
    TensorRule("fc_norm.{i}.weight", ("T",), ((0, "A"),), when="fc norm"),
    TensorRule("input_norm.weight", ("A*T",), when="norm before fc"),
)
OWN_HEAD = TensorRule("lm_head.weight", ("W", "H"))
D2T, T2D = TensorRule("d2t", ("W",), when="reduced"), TensorRule("t2d", ("V",), when="reduced")
EMBEDDING = TensorRule("embed_tokens.weight", ("V", "H"))
REDUCED_HEAD = TensorRule("lm_head.weight", ("W", "H"), when="reduced")

VLLM = LoaderRules(
    engine="vLLM 0.32 eagle3",
    source="model_executor/models/llama_eagle3.py:184-256, 395-470, qwen3_eagle3.py:175-245, 375-450",
    tensors=(
        *COMMON,
        *FEATURE_NORMS,
        *FIRST_LAYER,
        *FURTHER_LAYERS,
        REDUCED_HEAD,
        D2T,
        TensorRule("mask_hidden", ("1", "A*T"), when="masks"),
    ),
    optional=(EMBEDDING, OWN_HEAD, T2D),
    traps={"mask_hidden": "is skipped with a warning where the config has no mask token"},
    config={"tie_word_embeddings": False},
)
SGLANG = LoaderRules(
    engine="SGLang 0.5.23 EAGLE3",
    source="srt/models/llama_eagle3.py: LlamaForCausalLMEagle3",
    # The projections of the first layer have no bias there, whatever the config says, and fc always reads three layers.
    tensors=(TensorRule("fc.weight", ("H", "3*T")), COMMON[1], *FEATURE_NORMS, *FIRST_LAYER, REDUCED_HEAD, D2T),
    optional=(EMBEDDING, OWN_HEAD, T2D),
    config={
        "tie_word_embeddings": False,
        "model_type": "llama",
        "attention_bias": False,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
    },
)
AUTHORS = LoaderRules(
    engine="SafeAILab/EAGLE's EAGLE-3",
    source="eagle/model/cnets.py:478-541, ea_model.py:66",
    tensors=(TensorRule("fc.weight", ("H", "3*T")), COMMON[1], *FIRST_LAYER, OWN_HEAD, D2T, T2D),
    optional=(EMBEDDING,),
    config={"model_type": "llama", "attention_bias": False, "bias": False, "num_hidden_layers": 1},
)


# ---- what can be expressed ----


def refusal_vllm(config: DrafterConfig) -> Refusal | None:
    model_type = config.target_config["model_type"]
    if model_type not in (*LLAMA_LIKE, "qwen3"):
        return Refusal(f"vLLM has no EAGLE-3 class with {model_type}'s layers", "drafter.kind=draft_model")
    if config.target_config.get("hidden_act", "silu") != "silu":
        return Refusal("vLLM's Llama layers have no other activation than silu", "drafter.kind=draft_model")
    if getattr(config, "markov_rank", 0):
        return Refusal("P-EAGLE has no Markov head", "drafter.options.markov_rank=0")
    return None


def refusal_sglang(config: DrafterConfig) -> Refusal | None:
    return (
        refusal_vllm(config)
        or _refuse_more_than_llama(config, "SGLang's LlamaForCausalLMEagle3")
        or _refuse_embeddings_layer(config)
    )


def refusal_authors(config: DrafterConfig) -> Refusal | None:
    authors = "SafeAILab/EAGLE's EAGLE-3"
    return refusal_vllm(config) or _refuse_more_than_llama(config, authors) or _refuse_norms(config, authors)


def _refuse_more_than_llama(config: DrafterConfig, reader: str) -> Refusal | None:
    if config.target_config["model_type"] == "qwen3":
        return Refusal(f"{reader} drops q/k norms without a word", "drafter.kind=draft_model")
    if llama_config(config, 1, "")["attention_bias"]:
        return Refusal(f"{reader} has no biases in the attention", "drafter.kind=draft_model")
    if config.norm_before_residual:
        plain = "drafter.options.norm_before_residual=false"
        return Refusal(f"{reader} adds the attention to the features as they are, before the norm", plain)
    if len(config.feature_layers) != 3:
        three = "three layers in drafter.options.feature_layers"
        return Refusal(f"{reader} fuses three layers of the target, not {len(config.feature_layers)}", three)
    return None


def _refuse_norms(config: DrafterConfig, reader: str) -> Refusal | None:
    for key in NORMS:
        if getattr(config, key, False):
            return Refusal(f"{reader} knows no {key}", f"drafter.options.{key}=false")
    return None


def _refuse_embeddings_layer(config: DrafterConfig) -> Refusal | None:
    if 0 in config.feature_layers:
        others = "drafter.options.feature_layers without 0"
        return Refusal("SGLang adds 1 to the layers it reads, so that the embeddings (0) have no number there", others)
    return None


# ---- ours to theirs ----


def to_vllm(drafter: Drafter) -> Checkpoint:
    config = _config(drafter)
    config["eagle_aux_hidden_state_layer_ids"] = list(drafter.config.feature_layers)
    config["num_aux_hidden_states"] = len(drafter.config.feature_layers)
    config["norm_before_residual"] = drafter.config.norm_before_residual
    config |= _norms(drafter.config)
    if config["model_type"] == "qwen3":
        config["architectures"] = ["Eagle3Qwen3ForCausalLM"]
    if "mask_hidden" in drafter.state_dict():
        config["mask_token_id"] = config["pard_token"] = drafter.config.mask_token_id
    return Checkpoint(config, _tensors(drafter, config))


def to_sglang(drafter: Drafter) -> Checkpoint:
    config = _config(drafter)
    ids = [layer - 1 for layer in drafter.config.feature_layers]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    config["draft_vocab_size"] = drafter.config.draft_vocab_size  # null: the target's head
    config |= _norms(drafter.config)
    return Checkpoint(config, _tensors(drafter, config))


def to_authors(drafter: Drafter) -> Checkpoint:
    """Their code always has a head of its own, and gives `fc` a bias unless the config says no."""
    config = {**_config(drafter), "bias": False}
    config["eagle_config"] = {  # theirs has no key for it; importers of this layout look here
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in drafter.config.feature_layers]
    }
    tensors = _tensors(drafter, config)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target_head(drafter)
    return Checkpoint(config, tensors)


def target_head(drafter: Drafter) -> Tensor:
    """[V, H] in the drafter's dtype."""
    return cast(nn.Linear, drafter.attached.lm_head).weight.detach().to(drafter.dtype)


def _config(drafter: Drafter) -> dict[str, Any]:
    num_layers = len(drafter.layers)
    config = llama_config(drafter.config, num_layers, dtype_name(drafter))
    drafted = drafter.config.draft_vocab_size or config["vocab_size"]
    return {**config, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": drafted}


def _norms(config: DrafterConfig) -> dict[str, bool]:
    """As engines name them; all are off where a reader does not find them."""
    return {key: bool(getattr(config, key, False)) for key in NORMS}


def _tensors(drafter: Drafter, config: Mapping[str, Any]) -> dict[str, Tensor]:
    renamed = {
        "midlayer" + name.removeprefix("layers.0") if name.startswith("layers.0.") else name: value
        for name, value in drafter.state_dict().items()
    }
    if drafter.config.draft_vocab_size == config["vocab_size"]:  # a head of its own for all tokens: no map
        renamed = {name: value for name, value in renamed.items() if name not in ("d2t", "t2d")}
    return with_output_biases(renamed, config)


# ---- theirs to ours ----


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Of any of these layouts.

    Raises:
        UserError: It was made for another target, or does not say which layers of the target it reads.
    """
    config = checkpoint.config
    refuse_other_layers(config, target_config)
    state = {name.replace("midlayer.", "layers.0.", 1): value for name, value in checkpoint.tensors.items()}
    state = without_zero_biases(state, target_config)
    options: dict[str, Any] = {"feature_layers": _feature_layers(config, target_config), "loss": "kl"}
    options["norm_before_residual"] = bool(config.get("norm_before_residual", False))
    nested = config.get("eagle_config") or {}
    options |= {key: True for key in NORMS if nested.get(key, config.get(key))}
    drafted, vocabulary = config.get("draft_vocab_size"), target_config["vocab_size"]
    if drafted is not None and drafted != vocabulary:
        options["draft_vocab_size"] = drafted
        head = state.pop("lm_head.weight")
        borrowed = take_borrowed(state)
        state |= {"t2d": drafted_of_all(state["d2t"], vocabulary), "lm_head.weight": head}
    else:
        borrowed = take_borrowed(state)
        state = {name: value for name, value in state.items() if name not in ("d2t", "t2d")}
    if "mask_hidden" not in state:
        return Parameters("eagle3", options, state, borrowed)
    options.pop("norm_output", None)  # nothing is fed back
    options["mask_token_id"] = next((config[key] for key in MASK_TOKEN_KEYS if config.get(key) is not None), None)
    options["num_layers"] = config["num_hidden_layers"]
    state["mask_hidden"] = state["mask_hidden"].reshape(1, -1)
    return Parameters("peagle", options, state, borrowed)


def with_own_head(found: Parameters) -> Parameters:
    """A checkpoint whose LM head has all tokens and is not the target's: a draft vocabulary of all tokens."""
    head = found.borrowed["lm_head"]
    all_tokens = {"d2t": torch.zeros(len(head), dtype=torch.int64), "t2d": torch.ones(len(head), dtype=torch.bool)}
    others = {name: value for name, value in found.borrowed.items() if name != "lm_head"}
    options = {**found.options, "draft_vocab_size": len(head)}
    return replace(found, options=options, state={**found.state, **all_tokens, "lm_head.weight": head}, borrowed=others)


def _feature_layers(config: Mapping[str, Any], target_config: Mapping[str, Any]) -> list[int]:
    """By default what engines and the authors' code read: 2, L/2 and L-3, where these are three layers."""
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None:
        return list(ids)
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested is not None:
        return [layer + 1 for layer in nested]
    num_layers = target_config["num_hidden_layers"]
    if 2 < num_layers // 2 < num_layers - 3:
        return [2, num_layers // 2, num_layers - 3]
    raise UserError(
        "the checkpoint's config names no eagle_aux_hidden_state_layer_ids, and the usual ones are not in a target of "
        f"{num_layers} layers: add those that it was trained on to its config.json (k = after k layers of the target)"
    )
