"""Writing of layouts: exporters, the rules by which they refuse drafters, and shared tensor names and config keys.

A layout converts a drafter into a `Checkpoint`, and a checkpoint into `Parameters` (`reading.py`). Configs are written
with Llama's keys, which every reader of these layouts knows; RoPE also under its old keys, for old readers.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.reading import LAYER_KEYS, Checkpoint, Parameters, has_biases
from draftsmith.models.groups.layers import OTHER_KINDS, layers_config

LLAMAS = "drafter.options.layers=llama"  # advice if a reader cannot run the drafter's layers


@dataclass(frozen=True)
class Refusal:
    """Rule by which a layout refuses some drafters of a kind that it supports.

    Args:
        drafters: Which drafters are refused, in words for the documentation.
        applies: Returns whether a drafter of this config is refused.
        why: The reason, for the message; a `str.format` template with the drafter's `config`.
        recipe_line: Recipe line that makes the drafter expressible.
    """

    drafters: str
    applies: Callable[[DrafterConfig], Any]
    why: str
    recipe_line: str

    def sentence(self, config: DrafterConfig) -> str:
        return f"{self.why.format(config=config)}: train with {self.recipe_line}"


def has_plain_logits(config: DrafterConfig) -> bool:
    """Return whether logits are an LM head's plain output: an own head's, or the target has no scale and cap."""
    return config.has_own_heads or config.target_logits.is_plain


def has_uncapped_logits(config: DrafterConfig) -> bool:
    """Return whether readers that know only `logit_scale`, such as vLLM's EAGLE classes, give the same logits."""
    return config.has_own_heads or config.target_logits.cap is None


def has_targets_class(config: DrafterConfig) -> bool:
    """Return whether a model of the target's own class with the drafter's weights gives the same logits."""
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
        first_token: The reader has a row for a conversation's first token.
        parallel: All depths come from one forward.
        needs_target: Returns whether writing a drafter of this config needs tensors of the target.
        in_blocks: The config fixes the number of draft tokens.
        logits_fit: Returns whether the reader computes the same logits as this config's target, see
            `models/target_logits.py`.
        versions: Versions of the engine that read this kind, if these are not all of `FORMATS`.
        by_plugin: vLLM loads it by draftsmith's plugin, see `vllm_plugin.py`.
    """

    write: Callable[[Drafter], Checkpoint]
    read: Callable[[Checkpoint, Mapping[str, Any]], Parameters]
    refusals: tuple[Refusal, ...]
    method: str
    first_token: bool = False
    parallel: bool = False
    needs_target: Callable[[DrafterConfig], bool] = lambda config: False
    in_blocks: bool = False
    logits_fit: Callable[[DrafterConfig], bool] = has_plain_logits
    versions: str = ""
    by_plugin: bool = False

    def refusal(self, config: DrafterConfig) -> str | None:
        """Return why this format cannot express the drafter, and a recipe line that helps; None if it can."""
        refusals = self.refusals if self.logits_fit(config) else (*self.refusals, OTHER_LOGITS)
        return next((each.sentence(config) for each in refusals if each.applies(config)), None)


def drafted_tokens(config: DrafterConfig) -> int:
    """Return the number of draft tokens in a chain of this drafter."""
    return getattr(config, "draft_depth", None) or config.num_depths


def speculators_keys(drafter: Drafter, layers: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that every config of the speculators library has: its kind, its layers, and the target."""
    kind = drafter.config.kind
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": layers,
        "tie_word_embeddings": False,
        "dtype": layers["dtype"],
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
    """Build the rule that refuses drafters whose `option` is not `value`.

    Args:
        otherwise: Another recipe line that makes the drafter expressible.
    """
    text = json.dumps(value).strip('"')
    line = f"drafter.options.{option}={text}" + (f", or {otherwise}" if otherwise else "")
    return Refusal(f"`{option}` other than {text}", lambda config: getattr(config, option, value) != value, why, line)


def no_scaled_embeddings(why: str, layers: Collection[str] = ("target", *OTHER_KINDS)) -> Refusal:
    """Build the rule that refuses Gemma targets, which scale embeddings, for drafters with these `layers`."""

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


def llama_config(config: DrafterConfig, num_layers: int, dtype: str) -> dict[str, Any]:
    """Build a `config.json` of `num_layers` of the drafter's layers with the target's vocabulary, embeddings untied."""
    source = layers_config(config.layers_of, num_layers)
    values = {key: getattr(source, key, None) for key in LAYER_KEYS}
    values["head_dim"] = values["head_dim"] or source.hidden_size // source.num_attention_heads
    values["attention_bias"] = has_biases(config.layers_of)
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
    """Return config keys that give all layers the drafter's sliding window, or none.

    Qwen 3 of transformers drops `sliding_window` unless `use_sliding_window` is set; engines look at `layer_types`.
    """
    slides = config.sliding_window is not None
    return {
        "layer_types": ["sliding_attention" if slides else "full_attention"] * num_layers,
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window,
    }


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


def borrowed_head(drafter: Drafter, recipe_line: str) -> Tensor:
    """Return the weight [V', D] of the LM head that a drafter takes from its target, in the drafter's dtype.

    Args:
        recipe_line: Recipe line, for the message, of a drafter that needs no copy of the target's head.

    Raises:
        UserError: The head has a bias.
    """
    head = drafter.borrowed_head
    if head.bias is not None:
        raise UserError(f"the target's LM head has a bias, which no layout can hold: train with {recipe_line}")
    return head.weight.detach().to(drafter.dtype)


def dtype_name(drafter: Drafter) -> str:
    """Return the name of the drafter's dtype, such as `float32`."""
    return str(drafter.dtype).removeprefix("torch.")
