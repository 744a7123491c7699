"""Parts of all layouts: checkpoints, exporters, refusals, and shared tensor names and config keys.

A layout converts a drafter into a `Checkpoint`, and a checkpoint into `Parameters`. Configs are written with Llama's
keys, which every reader of these layouts knows; RoPE also under its old keys, for old readers.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from draftsmith.errors import UserError
from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.drafter import Drafter
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
LLAMAS = "drafter.options.layers=llama"  # advice if a reader cannot run the drafter's layers


@dataclass
class Checkpoint:
    """Config and tensors by name, in the layout of a reader."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass
class Parameters:
    """A kind of drafter, its options, and its state dict.

    Args:
        borrowed: Tensors by name (`embed_tokens`, `lm_head`) that our drafters take from the target, and must equal.
            The head has only the rows of `d2t` if the state has one.
        can_own_head: The layout has room for an LM head of the drafter's own, of all tokens.
        other_row: Row of the embedding that is the drafter's own mask, and may differ.
        assumed: Assumptions about facts that the checkpoint does not state; sentences without a full stop.
    """

    kind: str
    options: dict[str, Any]
    state: dict[str, Tensor]
    borrowed: dict[str, Tensor] = field(default_factory=dict)
    other_row: int | None = None
    can_own_head: bool = False
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Rule by which a layout refuses some drafters of a kind that it supports.

    Args:
        drafters: The refused drafters, in words for the documents.
        applies: Returns whether a drafter of this config is refused.
        why: The reason; a template for `str.format` with the drafter's `config`.
        recipe_line: Recipe line that makes the drafter expressible.
    """

    drafters: str
    applies: Callable[[DrafterConfig], Any]
    why: str
    recipe_line: str

    def sentence(self, config: DrafterConfig) -> str:
        return f"{self.why.format(config=config)}: train with {self.recipe_line}"


def has_plain_logits(config: DrafterConfig) -> bool:
    """Return whether logits are an LM head's plain output: of the drafter's own head, or the target changes nothing."""
    return config.has_own_heads or config.target_logits.is_plain


def has_uncapped_logits(config: DrafterConfig) -> bool:
    """Return whether a reader that supports `logit_scale` only, as vLLM's EAGLE classes, gives the same logits."""
    return config.has_own_heads or config.target_logits.cap is None


def has_targets_class(config: DrafterConfig) -> bool:
    """Return whether the drafter as a model of the target's own class would give the same logits."""
    return has_plain_logits(config) or config.layers == "target"


OTHER_LOGITS = Refusal(
    "a target that scales or caps its logits",
    lambda config: True,
    "its logits are those of the target's LM head, which are {config.target_logits}, and the reader's are not",
    "drafter.kind=eagle3 and drafter.options.draft_vocab_size, for a separate head",
)


@dataclass(frozen=True)
class Exporter:
    """Conversion of drafters of one kind to one format, and back.

    Args:
        write, read: The conversions to and from the format.
        refusals: Rules for drafters that it cannot express; the first one that applies is reported.
        method: The engine's name of the method.
        parallel: All depths come from one forward.
        needs_target: Returns whether writing a drafter of this config needs tensors of the target.
        in_blocks: The config fixes the number of draft tokens.
        logits_fit: Returns whether the reader computes the same logits as this config's target, see
            `models/target_logits.py`.
        first_vllm: First version of vLLM with this kind, if that is known, by serve_vllm of NVIDIA-NeMo/Automodel
            (nemo_automodel/components/speculative) or vLLM's pull requests.
        by_plugin: vLLM loads it by draftsmith's plugin, see `vllm_plugin.py`.
    """

    write: Callable[[Drafter], Checkpoint]
    read: Callable[[Checkpoint, Mapping[str, Any]], Parameters]
    refusals: tuple[Refusal, ...]
    method: str
    parallel: bool = False
    needs_target: Callable[[DrafterConfig], bool] = lambda config: False
    in_blocks: bool = False
    logits_fit: Callable[[DrafterConfig], bool] = has_plain_logits
    first_vllm: str = ""
    by_plugin: bool = False

    def refusal(self, config: DrafterConfig) -> str | None:
        """Return why it cannot express this drafter, and the recipe line that would help; None if it can."""
        refusals = self.refusals if self.logits_fit(config) else (*self.refusals, OTHER_LOGITS)
        return next((each.sentence(config) for each in refusals if each.applies(config)), None)


def drafted_tokens(config: DrafterConfig) -> int:
    """Return the number of draft tokens in a chain of this drafter."""
    return getattr(config, "draft_depth", None) or config.num_depths


def with_own_head(params: Parameters) -> Parameters:
    """Treat an LM head that is not the target's as that of a draft vocabulary of all tokens."""
    head = params.borrowed["lm_head"]
    all_tokens = {"d2t": torch.zeros(len(head), dtype=torch.int64), "t2d": torch.ones(len(head), dtype=torch.bool)}
    others = {name: value for name, value in params.borrowed.items() if name != "lm_head"}
    options = {**params.options, "draft_vocab_size": len(head)}
    state = {**params.state, **all_tokens, "lm_head.weight": head}
    return replace(params, options=options, state=state, borrowed=others)


def speculators_keys(drafter: Drafter) -> dict[str, Any]:
    """Return the keys of every config of the speculators library: its kind, and the target."""
    kind = drafter.config.kind
    return {
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafted_tokens(drafter.config)}],
            "verifier": {
                "name_or_path": drafter.config.target_name_or_path,
                "architectures": drafter.config.target_config.get("architectures") or [],
            },
        },
    }


def always(config: DrafterConfig) -> bool:
    """Return True for every drafter, for `Exporter.needs_target`."""
    return True


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str], back: bool = False) -> dict[str, Tensor]:
    """Rename tensors from our names to a layout's, or with `back` from the layout's to ours.

    Args:
        names: Prefixes of names, ours to theirs, with `#` for a number; the first that matches is replaced.
    """
    pairs = [(theirs, ours) if back else (ours, theirs) for ours, theirs in names.items()]
    patterns = [(re.compile(re.escape(old).replace(r"\#", r"(\d+)")), new) for old, new in pairs]
    result = {}
    for name, value in tensors.items():
        for old, new in patterns:
            if match := old.match(name):
                for number in match.groups():
                    new = new.replace("#", number, 1)
                name = new + name[match.end() :]
                break
        result[name] = value
    return result


def only(option: str, value: Any, why: str, otherwise: str = "") -> Refusal:
    """Build the rule that refuses drafters whose option has another value.

    Args:
        otherwise: Another recipe line that would help.
    """
    text = json.dumps(value).strip('"')
    line = f"drafter.options.{option}={text}" + (f", or {otherwise}" if otherwise else "")
    return Refusal(f"`{option}` other than {text}", lambda config: getattr(config, option, value) != value, why, line)


def no_scaled_embeddings(why: str, layers: Collection[str] = ("target", *OTHER_KINDS)) -> Refusal:
    """Build the rule that refuses drafters with such `layers` for Gemma's targets, which scale their embeddings."""

    def applies(config: DrafterConfig) -> bool:
        return config.target_config["model_type"].startswith("gemma") and config.layers in layers

    otherwise = "drafter.kind=draft_model" if "target" in layers else "drafter.options.layers=target"
    return Refusal("a target with scaled embeddings", applies, f"this target scales embeddings, {why}", otherwise)


def no_layers(model_type: str, why: str) -> Refusal:
    """Build the rule that refuses drafters with layers of this `model_type`."""
    return Refusal(f"{model_type}'s layers", lambda config: config.layers_of["model_type"] == model_type, why, LLAMAS)


def no_layers_but(model_types: Collection[str], why: str) -> Refusal:
    """Build the rule that refuses drafters with layers of other types, or with another activation than silu."""

    def applies(config: DrafterConfig) -> bool:
        layers = config.layers_of
        return layers["model_type"] not in model_types or layers.get("hidden_act", "silu") != "silu"

    return Refusal(f"other layers than {', '.join(model_types)}'s", applies, why, LLAMAS)


NO_ATTENTION_BIAS = Refusal(
    "biases in the attention",
    lambda config: llama_config(config, 1, "")["attention_bias"],
    "its layer has no biases in the attention",
    LLAMAS,
)


def _has_biases(layer_config: Mapping[str, Any]) -> bool:
    """Return whether queries, keys and values have biases."""
    return layer_config["model_type"] == "qwen2" or bool(layer_config.get("attention_bias"))


def llama_config(config: DrafterConfig, num_layers: int, dtype: str) -> dict[str, Any]:
    """Build a `config.json` of `num_layers` of the drafter's layers with the target's vocabulary, embeddings untied."""
    source = layers_config(config.layers_of, num_layers)
    values = {key: getattr(source, key, None) for key in LAYER_KEYS}
    values["head_dim"] = values["head_dim"] or source.hidden_size // source.num_attention_heads
    values["attention_bias"] = _has_biases(config.layers_of)
    values["mlp_bias"] = bool(getattr(source, "mlp_bias", False))
    rope = dict(values["rope_parameters"] or {})
    scaled = rope.get("rope_type", "default") != "default"
    return {
        "model_type": "qwen3" if source.model_type == "qwen3" else "llama",
        **values,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"} if scaled else None,
        "num_hidden_layers": num_layers,
        "vocab_size": config.target_config["vocab_size"],
        "tie_word_embeddings": False,
        **{key: config.target_config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **({} if has_plain_logits(config) else {"logit_scale": config.target_logit_scale}),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def window_keys(config: DrafterConfig, num_layers: int) -> dict[str, Any]:
    """Return the keys of a config that give all layers the drafter's window, or none.

    Qwen 3 of transformers drops `sliding_window` unless `use_sliding_window` is set; engines look at `layer_types`.
    """
    slides = config.sliding_window is not None
    return {
        "layer_types": ["sliding_attention" if slides else "full_attention"] * num_layers,
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window,
    }


def window_of(known: Mapping[str, Any]) -> int | None:
    """Return the sliding window of a config's layers in tokens; None if they have none.

    Raises:
        UserError: Only some layers have a window, or the config does not give its size.
    """
    kinds = set(known.get("layer_types") or ())
    slides = "sliding_attention" in kinds or bool(known.get("use_swa"))
    if not slides:
        return None
    if len(kinds) > 1:
        raise UserError(
            "config.json: `layer_types` mixes sliding and full attention, but drafters here have one `sliding_window` "
            "in all layers: import a drafter that has"
        )
    width = known.get("swa_window_size") or known.get("sliding_window")
    if not width:
        raise UserError(
            "config.json: the layers have sliding attention, but `sliding_window`, its number of tokens, is missing: "
            "add it"
        )
    return int(width)


def with_output_biases(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Add zero output biases, which Llama's classes have if they have any biases, and Qwen 2 does not."""
    if not config["attention_bias"]:
        return tensors
    missing = {
        name.removesuffix("weight") + "bias": weight.new_zeros(len(weight))
        for name, weight in tensors.items()
        if name.endswith("self_attn.o_proj.weight")
    }
    return {**missing, **tensors}


def without_zero_biases(state: dict[str, Tensor], layer_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Remove zero output biases, as added by `with_output_biases`."""
    if layer_config["model_type"] != "qwen2":
        return state
    return {name: value for name, value in state.items() if not name.endswith("o_proj.bias") or value.any()}


def take_borrowed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove embedding and head from a state dict. Returns them by name."""
    names = ("embed_tokens", "lm_head")
    return {name: state.pop(f"{name}.weight") for name in names if f"{name}.weight" in state}


def borrowed_head(drafter: Drafter, recipe_line: str) -> Tensor:
    """Return the weight [V', D] of the LM head that a drafter takes from its target, in the drafter's dtype.

    Args:
        recipe_line: Recipe line for a drafter whose head need not be written.

    Raises:
        UserError: The head has a bias.
    """
    head = drafter.vocab.borrowed_head
    if head.bias is not None:
        raise UserError(f"the target's LM head has a bias, which no layout can hold: train with {recipe_line}")
    return head.weight.detach().to(drafter.dtype)


def drafted_ids(d2t: Tensor) -> Tensor:
    """Convert offsets [W] of a draft vocabulary to ids [W] of the target's vocabulary."""
    return d2t + torch.arange(len(d2t))


def drafted_mask(d2t: Tensor, vocabulary: int) -> Tensor:
    """Convert offsets [W] of a draft vocabulary to its mask `t2d` [V]."""
    t2d = torch.zeros(vocabulary, dtype=torch.bool)
    t2d[drafted_ids(d2t)] = True
    return t2d


def dtype_name(drafter: Drafter) -> str:
    """Return the name of the drafter's dtype, such as `float32`."""
    return str(drafter.dtype).removeprefix("torch.")


def config_differences(config: Mapping[str, Any], layer_config: Mapping[str, Any], exactly: bool) -> list[str]:
    """List the keys in which the layers of a config, as transformers reads it, differ from our layers.

    Args:
        layer_config: The config that our layers are built from.
        exactly: Also compare keys that do not affect the output: the number of positions, the initial range.
    """
    ours, theirs = layers_config(layer_config, 1), _as_transformers_reads(config)
    differences = []
    for key in LAYER_KEYS:
        expected, value = getattr(ours, key, None), getattr(theirs, key, None)
        if key == "head_dim":
            expected = expected or ours.hidden_size // ours.num_attention_heads
            value = value or theirs.hidden_size // theirs.num_attention_heads
        if key == "rope_parameters":
            expected, value = _known(expected), _known(value)
        if value != expected and (exactly or key not in HARMLESS_KEYS):
            differences.append(f"{key} is {value} where the target's layers have {expected}")
    return differences


def _as_transformers_reads(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Build transformers' config from the keys of a foreign config that its layers depend on."""
    model_type = config.get("model_type")
    values = {key: config[key] for key in (*LAYER_KEYS, "rope_theta", "rope_scaling") if config.get(key) is not None}
    if "layer_width" in config:  # vLLM's states are wider than the layers, see `vllm_parallel.py`
        values["hidden_size"] = config["layer_width"]
    return AutoConfig.for_model(model_type if model_type in SUPPORTED_MODEL_TYPES else "llama", **values)


def _known(rope: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (rope or {}).items() if value is not None}


def _own_rope(config: Mapping[str, Any], layer_config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the option `rope` if a foreign config has another RoPE than our layers, and the assumptions made."""
    ours = _known(layers_config(layer_config, 1).rope_parameters)
    theirs = _known(_as_transformers_reads(config).rope_parameters)
    if theirs == ours:
        return {}, ()
    theta = f"{theirs['rope_theta']:,.0f}"
    if config.get("rope_theta") is None and not config.get("rope_parameters"):
        return {"rope": theirs}, (f"its config names no rope_theta: {theta} was taken, as its readers do",)
    sentence = f"its layers have another RoPE ({theta}) than the target's ({ours.get('rope_theta', 0):,.0f})"
    return {"rope": theirs}, (f"{sentence}: it is kept as drafter.options.rope",)


def read_layers(
    checkpoint: Checkpoint,
    target_config: Mapping[str, Any],
    kinds: Collection[str] = ("target", *OTHER_KINDS),
    with_own_rope: bool = True,
) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return the kind of a foreign checkpoint's layers, one of `kinds`, their option `rope`, and the assumptions made.

    Args:
        with_own_rope: Our drafters of this layout may have another RoPE than the target. A kind with the target's is
            preferred.

    Raises:
        UserError: Its layers do not have the target's shape, or it has another vocabulary.
    """
    config = checkpoint.config
    model_type, fits, differences = config.get("model_type"), None, list[str]()
    biased = any(name.endswith("self_attn.q_proj.bias") for name in checkpoint.tensors)
    for kind in kinds:
        layer_config = of_kind(kind, target_config)
        own = layer_config["model_type"]
        # Mistral's and Qwen 2's are written as Llama's.
        if own not in SUPPORTED_MODEL_TYPES or (own != model_type and "qwen3" in (own, model_type)):
            continue
        rope, assumed = _own_rope(config, layer_config)
        wrong = config_differences(config, layer_config, exactly=False)
        if with_own_rope and own in (model_type, *LLAMA_LIKE):
            wrong = [each for each in wrong if not each.startswith("rope_parameters")]
        if biased != _has_biases(layer_config):
            wrong.append(f"attention has {'' if biased else 'no '}biases where the target's layers are otherwise")
        if config.get("vocab_size") != target_config["vocab_size"]:
            wrong.append(f"vocab_size is {config.get('vocab_size')} where the target has {target_config['vocab_size']}")
        if not wrong and not rope:
            return kind, {}, ()
        fits = fits or (None if wrong else (kind, rope, assumed))
        differences += wrong
    if fits is not None:
        return fits
    first = differences[0] if differences else f"layers are {model_type}'s"
    raise UserError(
        f"the checkpoint's {first}: drafters here have layers of the target's shape, so import one that was made for "
        "this target and has them"
    )
