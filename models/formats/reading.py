"""Reading of foreign checkpoints: their config's keys, draft vocabularies and layers, each checked where it is read.

A layout's `read` function converts a checkpoint to `Parameters`. A wrong or missing key is a `UserError` that names it.

Shapes: W tokens of a draft vocabulary, V vocabulary, D hidden.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from draftsmith.errors import UserError, reason
from draftsmith.models.base.options import is_rope_theta
from draftsmith.models.groups.layers import OTHER_KINDS, SUPPORTED_MODEL_TYPES, layers_config, of_kind

# Layer types that Llama's classes can run: Mistral's and Qwen 2's differ from Llama's only in the target's sliding
# windows, which drafters do not take over, and in biases.
LLAMA_LIKE = ("llama", "mistral", "qwen2")
# Config keys that a drafter's layers take from the target; a foreign config must have equal values.
LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "initializer_range",
)  # fmt: skip
HARMLESS_KEYS = ("max_position_embeddings", "initializer_range")
# Sections of configs, whose keys are read as if they were at the top; a later one takes precedence.
SECTIONS = ("transformer_layer_config", "eagle_config", "dflash_config")
FEATURE_LAYERS = "eagle_aux_hidden_state_layer_ids"  # counted otherwise in `eagle_config`, so that both are kept
LARGEST = 2**31 - 1  # whole number in a config
# Tensors with a row for each token of a draft vocabulary.
ROWS_OF_TOKENS = ("lm_head.weight", "markov_head.markov_w2.weight")


class Keys(dict[str, Any]):
    """Values of another program's `config.json` by key, including the keys of its sections."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        for section in SECTIONS:
            values = config.get(section) or {}
            if not isinstance(values, dict):
                raise UserError(f"config.json: `{section}` is {values!r}, not a mapping of keys: correct it")
            self.update({key: value for key, value in values.items() if key != FEATURE_LAYERS})
        if FEATURE_LAYERS in (layers := config.get("transformer_layer_config") or {}):
            self[FEATURE_LAYERS] = layers[FEATURE_LAYERS]

    def __missing__(self, key: str) -> Any:
        raise UserError(f"config.json: `{key}` is missing: add the value that the drafter was trained with")

    def whole(self, key: str, lowest: int = 0) -> int:
        """Return the key's value, which must be a whole number.

        Raises:
            UserError: The key is missing, or its value is no whole number from `lowest` to `LARGEST`.
        """
        value = self[key]
        if type(value) is not int or not lowest <= value <= LARGEST:
            raise UserError(
                f"config.json: `{key}` is {value!r}, not a whole number from {lowest} to {LARGEST}: correct it"
            )
        return value

    def wholes(self, key: str, values: Any = None) -> list[int]:
        """Return `values`, or by default the key's value, which must be a list of whole numbers.

        Raises:
            UserError: The key is missing, or its value is no list of whole numbers.
        """
        values = self[key] if values is None else values
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise UserError(f"config.json: `{key}` is {values!r}, not a list of whole numbers: correct it")
        return values

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the key's value, which must be true or false; `default` if it is missing or null.

        Raises:
            UserError: The value is neither true nor false.
        """
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise UserError(f"config.json: `{key}` is {value!r}, neither true nor false: correct it")
        return default if value is None else value

    def draft_tokens(self) -> int | None:
        """Return the number of draft tokens in a round, if this is a config of speculators that names it, or None."""
        value: Any = self
        for part in ("speculators_config", "proposal_methods", 0, "speculative_tokens"):
            try:
                value = value[part]
            except (LookupError, TypeError, UserError):
                return None
        return value if type(value) is int and value > 0 else None


@dataclass
class Checkpoint:
    """A checkpoint in another program's layout: its config, and its tensors by name."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def keys(self) -> Keys:
        """Return the config as `Keys`, whose methods check each value that is read."""
        return Keys(self.config)


@dataclass
class Parameters:
    """A checkpoint converted to our terms: kind of drafter, options, and state dict.

    Args:
        borrowed: Tensors by name (`embed_tokens`, `lm_head`) that our drafters take from the target, and must equal.
            The head has only the rows of `d2t` if the state has one.
        can_own_head: The layout has room for an LM head of the drafter's own, of all tokens.
        assumed: Assumptions about facts that the checkpoint does not state; sentences without a full stop.
    """

    kind: str
    options: dict[str, Any]
    state: dict[str, Tensor]
    borrowed: dict[str, Tensor] = field(default_factory=dict)
    can_own_head: bool = False
    assumed: tuple[str, ...] = ()


# ---- heads and vocabularies ----


def take_borrowed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove embedding and LM head from a state dict; return them by name."""
    names = ("embed_tokens", "lm_head")
    return {name: state.pop(f"{name}.weight") for name in names if f"{name}.weight" in state}


def all_tokens(vocabulary: int) -> dict[str, Tensor]:
    """Return the maps `d2t` and `t2d` of a draft vocabulary of all tokens."""
    return {"d2t": torch.zeros(vocabulary, dtype=torch.int64), "t2d": torch.ones(vocabulary, dtype=torch.bool)}


def with_own_head(params: Parameters) -> Parameters:
    """Make a checkpoint's LM head the drafter's own, with a draft vocabulary of all tokens."""
    head = params.borrowed["lm_head"]
    others = {name: value for name, value in params.borrowed.items() if name != "lm_head"}
    options = {**params.options, "draft_vocab_size": len(head)}
    state = {**params.state, **all_tokens(len(head)), "lm_head.weight": head}
    return replace(params, options=options, state=state, borrowed=others)


def drafted_ids(d2t: Tensor) -> Tensor:
    """Convert offsets [W] of a draft vocabulary to ids [W] of the target's vocabulary."""
    return d2t + torch.arange(len(d2t))


def read_draft_vocabulary(state: dict[str, Tensor], keys: Keys, vocabulary: int) -> int | None:
    """Check a checkpoint's draft vocabulary, and sort it by id, in place, together with the rows of its heads.

    `d2t` may hold offsets, or ids if `t2d` shows that; afterwards it holds offsets. Without `d2t`, `t2d` is used.

    Returns:
        W, the number of drafted tokens; None if these are all tokens, in their order, so that no map is needed.

    Raises:
        UserError: The ids are not whole numbers, or not those of different tokens of the target; the map is missing; or
            it contradicts `t2d`, the config or the heads.
    """
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    size = keys.whole("draft_vocab_size", 1) if keys.get("draft_vocab_size") is not None else None
    if t2d is not None and t2d.shape != (vocabulary,):
        raise UserError(f"t2d is {list(t2d.shape)} where the target has {vocabulary} tokens: import a drafter for it")
    marked = None if t2d is None else t2d.bool().nonzero().flatten()
    if d2t is None:
        if size in (None, vocabulary):
            return None
        if marked is None:
            raise UserError(
                f"config.json names a draft vocabulary of {size} tokens of {vocabulary}, but the checkpoint has no "
                "d2t, the map to the target's tokens: fetch it again, or ask who trained it"
            )
        ids = marked
    else:
        if d2t.ndim != 1 or d2t.is_floating_point() or d2t.is_complex() or d2t.dtype == torch.bool:
            raise UserError(f"d2t is {d2t.dtype} {list(d2t.shape)}, not a list of whole numbers: fetch it again")
        ids = drafted_ids(d2t.to(torch.int64))
        if marked is not None and not torch.equal(ids.sort().values, marked):
            ids = d2t.to(torch.int64)
            if not torch.equal(ids.sort().values, marked):
                raise UserError(
                    "t2d marks other tokens than d2t names, as offsets or as ids: fetch the checkpoint again"
                )
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if len(outside) or len(ids.unique()) < len(ids):
        wrong = f"token {int(outside[0])}, and the target has {vocabulary}" if len(outside) else "a token twice"
        raise UserError(f"d2t names {wrong}: fetch the checkpoint again, or import one that was made for this target")
    if size not in (None, len(ids)):
        raise UserError(f"config.json: `draft_vocab_size` is {size}, but d2t names {len(ids)} tokens: correct it")
    ids, order = ids.sort()
    for name in ROWS_OF_TOKENS:
        if name in state:
            if state[name].shape[:1] != ids.shape:
                raise UserError(
                    f"{name} is {list(state[name].shape)} where d2t names {len(ids)} tokens: fetch it again"
                )
            state[name] = state[name][order]
    if len(ids) == vocabulary:
        return None
    state["d2t"], state["t2d"] = ids - torch.arange(len(ids)), torch.zeros(vocabulary, dtype=torch.bool)
    state["t2d"][ids] = True
    return len(ids)


# ---- layers ----


def window_of(keys: Keys) -> int | None:
    """Return the sliding window of a config's layers in tokens; None if they have none.

    Raises:
        UserError: Only some layers have a window, the config does not give its size, or its types are no list.
    """
    named = keys.get("layer_types") or []
    if not isinstance(named, list):
        raise UserError(f"config.json: `layer_types` is {named!r}, not a list of each layer's type: correct it")
    kinds = set(map(str, named))
    if "sliding_attention" not in kinds and not keys.flag("use_swa"):
        return None
    if len(kinds) > 1:
        raise UserError(
            "config.json: `layer_types` mixes sliding and full attention, but drafters here have one `sliding_window` "
            "in all layers: import a drafter that has"
        )
    return keys.whole("swa_window_size" if keys.get("swa_window_size") else "sliding_window", 1)


def config_differences(config: Mapping[str, Any], layer_config: Mapping[str, Any], exactly: bool) -> dict[str, str]:
    """Describe, by key, how the layers of a config (as transformers reads it) differ from our layers.

    Args:
        layer_config: The config that our layers are built from.
        exactly: Also compare keys that do not affect the output: the number of positions, the initial range.
    """
    ours, theirs = _layer_values(layers_config(layer_config, 1)), _layer_values(_as_transformers_reads(Keys(config)))
    return {
        key: f"{key} is {theirs[key]} where the target's layers have {ours[key]}"
        for key in ("partial_rotary_factor", *LAYER_KEYS)
        if theirs[key] != ours[key] and (exactly or key not in HARMLESS_KEYS)
    }


def _layer_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what decides on the layers of transformers' config, with the default of `head_dim`."""
    values = {key: getattr(config, key, None) for key in LAYER_KEYS}
    values["head_dim"] = values["head_dim"] or config.hidden_size // config.num_attention_heads
    rope = {key: value for key, value in (values["rope_parameters"] or {}).items() if value is not None}
    partial = rope.pop("partial_rotary_factor", 1.0)
    rope |= {} if partial == 1.0 else {"partial_rotary_factor": partial}
    return {**values, "rope_parameters": rope, "partial_rotary_factor": partial}


def _as_transformers_reads(keys: Keys) -> PreTrainedConfig:
    """Build transformers' config from the keys of a foreign config that its layers depend on.

    RoPE may be given for each type of layer; it is that of the drafter's.

    Raises:
        UserError: A value is not what transformers takes.
    """
    model_type = keys.get("model_type")
    read = (*LAYER_KEYS, "rope_theta", "rope_scaling", "partial_rotary_factor")
    values = {key: keys[key] for key in read if keys.get(key) is not None}
    if "layer_width" in keys:  # vLLM's states are wider than the layers, see `vllm_parallel.py`
        values["hidden_size"] = keys["layer_width"]
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and rope and all(isinstance(of_type, dict) for of_type in rope.values()):
        layer_type = "full_attention" if window_of(keys) is None else "sliding_attention"
        if layer_type not in rope:
            raise UserError(f"config.json: `rope_parameters` has none for the drafter's {layer_type}: add it")
        values["rope_parameters"] = rope[layer_type]
    try:
        config = AutoConfig.for_model(model_type if model_type in SUPPORTED_MODEL_TYPES else "llama", **values)
        theta = config.rope_parameters["rope_theta"]
    except Exception as error:  # of any type: transformers checks each key in its own way
        raise UserError(
            f"config.json: the keys of its layers are not what transformers reads ({reason(error)})"
        ) from None
    for each in (theta, values.get("rope_theta", theta)):  # the second is not read where there are `rope_parameters`
        if not is_rope_theta(each):
            raise UserError(f"config.json: `rope_theta` is {each!r}, not a finite number above 0: correct it")
    return config


def has_biases(layer_config: Mapping[str, Any]) -> bool:
    """Return whether queries, keys and values of layers have biases."""
    return layer_config["model_type"] == "qwen2" or bool(layer_config.get("attention_bias"))


def without_zero_biases(state: dict[str, Tensor], layer_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Remove zero output biases, as added by `with_output_biases`."""
    if layer_config["model_type"] != "qwen2":
        return state
    return {name: value for name, value in state.items() if not name.endswith("o_proj.bias") or value.any()}


def read_layers(
    checkpoint: Checkpoint,
    target_config: Mapping[str, Any],
    kinds: Collection[str] = ("target", *OTHER_KINDS),
    with_own_rope: bool = True,
    with_own_width: bool = False,
) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return the kind of a foreign checkpoint's layers, one of `kinds`, their own options, and the assumptions made.

    Args:
        with_own_rope: Our drafters of this layout may have another RoPE than the target. A kind with the target's is
            preferred.
        with_own_width: Our drafters of this layout may have MLPs of another width than the target's.

    Raises:
        UserError: The checkpoint's layers do not have the target's shape, or it has another vocabulary.
    """
    keys = checkpoint.keys
    if with_own_width and (width := keys.whole("intermediate_size", 1)) != target_config.get("intermediate_size"):
        of_width = {**target_config, "intermediate_size": width}
        kind, options, assumed = read_layers(checkpoint, of_width, kinds, with_own_rope)
        return kind, {**options, "intermediate_size": width}, assumed
    model_type, fits, differences = keys.get("model_type"), list[tuple[str, bool]](), list[str]()
    biased = any(name.endswith("self_attn.q_proj.bias") for name in checkpoint.tensors)
    for kind in kinds:
        layer_config = of_kind(kind, target_config)
        own = layer_config["model_type"]
        # Mistral's and Qwen 2's are written as Llama's.
        if own not in SUPPORTED_MODEL_TYPES or (own != model_type and "qwen3" in (own, model_type)):
            continue
        wrong = config_differences(keys, layer_config, exactly=False)
        has_other_rope = "rope_parameters" in wrong
        if with_own_rope and own in (model_type, *LLAMA_LIKE):
            wrong.pop("rope_parameters", None)
        if biased != has_biases(layer_config):
            wrong[""] = f"attention has {'' if biased else 'no '}biases where the target's layers are otherwise"
        if keys.get("vocab_size") != target_config["vocab_size"]:
            wrong[""] = f"vocab_size is {keys.get('vocab_size')} where the target has {target_config['vocab_size']}"
        fits += [] if wrong else [(kind, has_other_rope)]
        differences += wrong.values()
    if not fits:
        first = differences[0] if differences else f"layers are {model_type}'s"
        raise UserError(
            f"the checkpoint's {first}: import a drafter that was made for this target, and whose layers have its shape"
        )
    kind, has_other_rope = min(fits, key=lambda fit: fit[1])
    if not has_other_rope:
        return kind, {}, ()
    theirs, ours = (
        _layer_values(config)["rope_parameters"]
        for config in (_as_transformers_reads(keys), layers_config(of_kind(kind, target_config), 1))
    )
    if keys.get("rope_theta") is None and not keys.get("rope_parameters"):
        sentence = f"its config names no rope_theta: {theirs['rope_theta']:,.0f} was taken, as its readers do"
        return kind, {"rope": theirs}, (sentence,)
    words = [f"{rope.get('rope_type', 'default')}, {rope.get('rope_theta', 0):,.0f}" for rope in (theirs, ours)]
    sentence = f"its layers have another RoPE ({words[0]}) than the target's ({words[1]})"
    return kind, {"rope": theirs}, (f"{sentence}: it is kept as drafter.options.rope",)
