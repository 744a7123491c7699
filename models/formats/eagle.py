"""Layouts of EAGLE, EAGLE-3 and P-EAGLE, as engines and the speculators library read them.

The layouts of the authors' code (SafeAILab/EAGLE) are imported too, and not written.

**EAGLE.** Our tensor names are this layout's: `fc` and one decoder layer without input norm; embedding and head are the
target's. Readers differ in the bias of `fc`: vLLM silently drops it, SGLang always has one, the authors' code has one
unless the config says `bias: false`. vLLM reads that key as the attention's bias, so it is not written for vLLM.

**EAGLE-3.** One name differs: the first layer is `midlayer` there, `layers.0` here and in speculators. `d2t` holds
offsets in all layouts; `t2d` is ignored by engines. Engines number the fused layers
differently: vLLM's ids are ours (0 for the embeddings), SGLang's are one less and in `eagle_config`.

vLLM reads the speculators library's config too, with the layers' keys and the number of fused layers from
`transformer_layer_config`; SGLang does not. `norm_before_residual` is always written, as its default differs between
shapes and readers. The norms of EAGLE-3.1 are written in both places: vLLM reads P-EAGLE's `fc_norm` only from the
layers' keys.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.layout import (
    NO_ATTENTION_BIAS,
    Exporter,
    Refusal,
    always,
    borrowed_head,
    dtype_name,
    has_uncapped_logits,
    llama_config,
    no_layers,
    no_layers_but,
    no_scaled_embeddings,
    only,
    renamed,
    speculators_keys,
    window_keys,
    with_output_biases,
)
from draftsmith.models.formats.reading import (
    FEATURE_LAYERS,
    LLAMA_LIKE,
    Checkpoint,
    Keys,
    Parameters,
    read_draft_vocabulary,
    read_layers,
    take_borrowed,
    window_of,
    without_zero_biases,
)
from draftsmith.models.groups.layers import of_kind

NAMES = {"layers.0.": "midlayer."}
# Norms of EAGLE-3.1 and related drafters: the same keys in our options and in engines' configs.
NORMS = ("fc_norm", "norm_before_fc", "norm_output")
NO_FIRST_TOKEN = {"first_token": False}  # published checkpoints were trained without a row for it
# Keys of the mask token in P-EAGLE configs: vLLM 0.32, v1/spec_decode/llm_base_proposer.py:361-373.
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


# ---- what can be expressed ----

EAGLE3_RULES = (
    no_scaled_embeddings("and EAGLE-3's classes do not"),
    no_layers_but((*LLAMA_LIKE, "qwen3"), "vLLM has no EAGLE-3 class with {config.layers_of[model_type]}'s layers"),
)
PEAGLE_RULES = (*EAGLE3_RULES, only("markov_rank", 0, "P-EAGLE has no Markov head"))
THREE_LAYERS = Refusal(
    "more or fewer than three layers of the target", lambda config: len(config.feature_layers) != 3,
    "its EAGLE-3 class fuses three layers of the target, not {config.feature_layers}",
    "three layers in drafter.options.feature_layers",
)  # fmt: skip
# SGLang and llama.cpp run Llama's layer only.
LLAMA_ALONE = (
    *EAGLE3_RULES,
    no_layers("qwen3", "its EAGLE-3 layer has no q/k norms"),
    only("sliding_window", None, "its EAGLE-3 layer attends to all tokens"),
    NO_ATTENTION_BIAS,
    THREE_LAYERS,
)
SGLANG_RULES = (
    *LLAMA_ALONE,
    only("norm_before_residual", False, "it adds attention to the features before their norm"),
    Refusal(
        "the embeddings among its layers",
        lambda config: 0 in config.feature_layers,
        "SGLang counts layers from the output of the first one, so that the embeddings (0) have no number",
        "drafter.options.feature_layers without 0",
    ),
)


# ---- ours to theirs ----


def to_vllm(drafter: Drafter) -> Checkpoint:
    """Convert an EAGLE-3 or P-EAGLE drafter to vLLM's layout."""
    config = _config(drafter)
    config[FEATURE_LAYERS] = list(drafter.config.feature_layers)
    config["num_aux_hidden_states"] = len(drafter.config.feature_layers)
    config["norm_before_residual"] = drafter.config.norm_before_residual
    config |= _norms(drafter.config)
    if drafter.config.sliding_window is not None:
        config |= window_keys(drafter.config, len(drafter.layers))
    if config["model_type"] == "qwen3":
        config["architectures"] = ["Eagle3Qwen3ForCausalLM"]
    if "mask_hidden" in drafter.state_dict():
        config["mask_token_id"] = config["pard_token"] = drafter.config.mask_token_id
    return Checkpoint(config, _tensors(drafter, config))


def to_sglang(drafter: Drafter) -> Checkpoint:
    """Convert an EAGLE-3 drafter for SGLang, which numbers feature layers from 0."""
    config = _config(drafter)
    ids = [layer - 1 for layer in drafter.config.feature_layers]
    config["eagle_config"] = {FEATURE_LAYERS: ids, "use_aux_hidden_state": True}
    config["draft_vocab_size"] = drafter.config.draft_vocab_size  # null: the target's head
    config |= _norms(drafter.config)
    return Checkpoint(config, _tensors(drafter, config))


def to_speculators(drafter: Drafter) -> Checkpoint:
    """Convert a drafter for the speculators library, whose class needs an LM head: the target's by default."""
    written = to_vllm(drafter)
    layers, has_masks = written.config, "mask_hidden" in written.tensors
    layers["architectures"] = ["LlamaForCausalLM" if layers["model_type"] == "llama" else "Qwen3ForCausalLM"]
    config = {
        "architectures": ["PEagleSpeculator" if has_masks else "Eagle3Speculator"],
        **speculators_keys(drafter, layers),
        **{key: layers.pop(key) for key in ("draft_vocab_size", FEATURE_LAYERS, "norm_before_residual")},
        **{key: layers[key] for key in NORMS},
    }
    tensors = renamed(written.tensors, NAMES, back=True)
    if has_masks:
        config["mask_token_id"] = layers.pop("mask_token_id")
        del layers["pard_token"]
        tensors["mask_hidden"] = tensors["mask_hidden"].unsqueeze(0)
    if "lm_head.weight" not in tensors:
        line = f"drafter.options.draft_vocab_size={drafter.config.target_config['vocab_size']}"
        tensors["lm_head.weight"] = borrowed_head(drafter, line)
    return Checkpoint(config, tensors)


def _config(drafter: Drafter) -> dict[str, Any]:
    config = llama_config(drafter.config, len(drafter.layers), dtype_name(drafter))
    drafted = drafter.config.draft_vocab_size or config["vocab_size"]
    return {**config, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": drafted}


def _norms(config: DrafterConfig) -> dict[str, bool]:
    """Return the config keys of EAGLE-3.1's norms; engines read a missing key as False."""
    return {key: bool(getattr(config, key, False)) for key in NORMS}


def _tensors(drafter: Drafter, config: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = renamed(drafter.state_dict(), NAMES)
    if drafter.config.draft_vocab_size == config["vocab_size"]:  # its own head has all tokens: no map
        tensors = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    return with_output_biases(tensors, config)


# ---- theirs to ours ----


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Convert a checkpoint of EAGLE-3 or P-EAGLE, in any of these layouts, into our parameters.

    Raises:
        UserError: The checkpoint was made for another target, or its feature layers or mask token are not known.
    """
    keys = checkpoint.keys
    kind, rope, rope_assumed = read_layers(checkpoint, target_config)
    state = without_zero_biases(renamed(checkpoint.tensors, NAMES, back=True), of_kind(kind, target_config))
    layers, layers_assumed = _feature_layers(keys, target_config)
    options: dict[str, Any] = {"feature_layers": layers, "loss": "kl", "layers": kind, **NO_FIRST_TOKEN, **rope}
    # The library's two readers agree on EAGLE-3's default and on P-EAGLE's.
    options["norm_before_residual"] = keys.flag("norm_before_residual", keys.get("speculators_model_type") == "eagle3")
    options["sliding_window"] = window_of(keys)
    options |= {key: True for key in NORMS if keys.flag(key)}
    drafted = read_draft_vocabulary(state, keys, target_config["vocab_size"])
    borrowed = take_borrowed(state)
    if drafted is not None:
        options["draft_vocab_size"] = drafted
        state |= {"lm_head.weight": borrowed.pop("lm_head")} if "lm_head" in borrowed else {}
    assumed, tokens = (*layers_assumed, *rope_assumed), keys.draft_tokens()
    if "mask_hidden" not in state:
        options |= {} if tokens is None else {"draft_depth": tokens}
        return Parameters("eagle3", options, state, borrowed, can_own_head=True, assumed=assumed)
    options.pop("norm_output", None)  # nothing is fed back
    named = next((key for key in MASK_TOKEN_KEYS if keys.get(key) is not None), None)
    if named is None:  # SpecForge's trainer takes it as an argument
        raise UserError(
            f"config.json names no mask token ({', '.join(MASK_TOKEN_KEYS)}): add `{MASK_TOKEN_KEYS[0]}`, the id that "
            "the drafter was trained with"
        )
    options |= {"mask_token_id": keys.whole(named), "num_layers": keys.whole("num_hidden_layers", 1)}
    options |= {} if tokens is None else {"num_masks": tokens - 1}
    state["mask_hidden"] = state["mask_hidden"].reshape(1, -1)
    return Parameters("peagle", options, state, borrowed, can_own_head=True, assumed=assumed)


def _feature_layers(keys: Keys, target_config: Mapping[str, Any]) -> tuple[list[int], tuple[str, ...]]:
    """Return the feature layers, and a note on the assumptions made.

    The default is that of all readers: 2, L/2 and L-3, if these are three layers.

    Raises:
        UserError: The config contradicts itself, or the default is not in the target.
    """
    nested = (keys.get("eagle_config") or {}).get(FEATURE_LAYERS)
    if keys.get(FEATURE_LAYERS) is not None or nested is not None:
        counted = None if nested is None else [layer + 1 for layer in keys.wholes(FEATURE_LAYERS, nested)]
        layers = counted if keys.get(FEATURE_LAYERS) is None else keys.wholes(FEATURE_LAYERS)
        assert layers is not None
        number = keys.get("num_aux_hidden_states")
        if number is not None and number != len(layers):
            raise UserError(
                f"config.json: num_aux_hidden_states is {number}, and {FEATURE_LAYERS} names {len(layers)} layers: "
                "correct the one that is wrong"
            )
        if counted not in (None, layers):
            places = f"{layers} (after that many layers) and in eagle_config {nested} (counted from 0)"
            return layers, (f"its config names other layers in two places, {places}: the first were taken",)
        return layers, ()
    num_layers = target_config["num_hidden_layers"]
    if 2 < num_layers // 2 < num_layers - 3:
        layers = [2, num_layers // 2, num_layers - 3]
        sentence = f"its config names no {FEATURE_LAYERS}: {layers} were guessed, as its readers do"
        return layers, (f"{sentence}; if it was trained on others, it drafts badly: add them to its config.json",)
    raise UserError(
        f"the checkpoint's config names no {FEATURE_LAYERS}, and the usual ones are not in a target of {num_layers} "
        "layers: add those that it was trained on to its config.json (k = after k layers of the target)"
    )


# ---- EAGLE ----

EAGLE_RULES = (
    no_scaled_embeddings("and EAGLE's classes do not"),
    no_layers("qwen3", "its Llama layer has no q/k norms"),
    no_layers_but(LLAMA_LIKE, "its Llama layer does not run {config.layers_of[model_type]}'s layers"),
    only("draft_vocab_size", None, "EAGLE's layout has no draft vocabulary", "drafter.kind=eagle3"),
    only("sliding_window", None, "no reader of EAGLE's layout supports a sliding window"),
)
FC_BIAS = only("fc_bias", False, "vLLM silently drops the bias of fc")


def eagle_to_vllm(drafter: Drafter, architecture: str = "LlamaForCausalLM") -> Checkpoint:
    """Convert an EAGLE drafter to vLLM's layout, or to another reader's with its name of the architecture."""
    config = {**llama_config(drafter.config, 1, dtype_name(drafter)), "architectures": [architecture]}
    return Checkpoint(config, with_output_biases(dict(drafter.state_dict()), config))


def eagle_to_sglang(drafter: Drafter) -> Checkpoint:
    """Convert an EAGLE drafter for SGLang."""
    written = eagle_to_vllm(drafter, "LlamaForCausalLMEagle")
    fc = written.tensors["fc.weight"]
    written.tensors.setdefault("fc.bias", fc.new_zeros(len(fc)))
    return written


def eagle_parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Convert a checkpoint in any of EAGLE's layouts into our parameters.

    Raises:
        UserError: The checkpoint was made for a target of another shape.
    """
    kind, rope, assumed = read_layers(checkpoint, target_config)
    state = without_zero_biases(dict(checkpoint.tensors), of_kind(kind, target_config))
    keys = checkpoint.keys
    drafted = read_draft_vocabulary(state, keys, target_config["vocab_size"])
    borrowed, tokens = take_borrowed(state), keys.draft_tokens()
    biased = "fc.bias" in state and (keys.flag("bias") or bool(state["fc.bias"].any()))
    if not biased:
        state.pop("fc.bias", None)
    options = {"fc_bias": biased, "layers": kind, "draft_vocab_size": drafted, **NO_FIRST_TOKEN, **rope}
    options |= {} if tokens is None else {"draft_depth": tokens}
    return Parameters("eagle", options, state, borrowed, assumed=assumed)


# A kind that a format does not support is advised to train the format's first kind here: EAGLE-3.
EXPORTERS = {
    ("eagle3", "vllm"): Exporter(to_vllm, parameters, EAGLE3_RULES, "eagle3", logits_fit=has_uncapped_logits),
    ("peagle", "vllm"): Exporter(
        to_vllm, parameters, PEAGLE_RULES, "eagle3", parallel=True, logits_fit=has_uncapped_logits
    ),
    ("eagle3", "sglang"): Exporter(to_sglang, parameters, SGLANG_RULES, "EAGLE3"),
    ("eagle3", "speculators"): Exporter(to_speculators, parameters, EAGLE3_RULES, "eagle3", needs_target=always),
    ("peagle", "speculators"): Exporter(
        to_speculators, parameters, PEAGLE_RULES, "eagle3", parallel=True, needs_target=always
    ),
    ("eagle", "vllm"): Exporter(
        eagle_to_vllm, eagle_parameters, (*EAGLE_RULES, FC_BIAS), "eagle", logits_fit=has_uncapped_logits
    ),
    ("eagle", "sglang"): Exporter(eagle_to_sglang, eagle_parameters, (*EAGLE_RULES, NO_ATTENTION_BIAS), "EAGLE"),
}
