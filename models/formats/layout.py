"""What a layout is made of: checkpoints, exporters, refusals, and the names and config keys that layouts share.

A layout turns a drafter into a `Checkpoint` and back into `Parameters`. Configs are written in Llama's keys, in which
every reader of these layouts looks for them; old readers find RoPE under its old keys too.
"""

import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from draftsmith.errors import UserError
from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.groups.layers import OTHER_KINDS, SUPPORTED_MODEL_TYPES, layers_config, of_kind

# Layers that Llama's classes run: Mistral's and Qwen 2's differ from Llama's in sliding windows, which drafters do not
# have, and in biases.
LLAMA_LIKE = ("llama", "mistral", "qwen2")
# What a drafter's layers take from the target, and what a foreign config may not say otherwise.
LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "initializer_range",
)  # fmt: skip
HARMLESS_KEYS = ("max_position_embeddings", "initializer_range")
LLAMAS = "drafter.options.layers=llama"  # the way out where a reader does not run the drafter's layers


@dataclass
class Checkpoint:
    """`config.json` and tensors by name, as a reader wants them."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass
class Parameters:
    """A kind of drafter, its options, and its state dict.

    Args:
        borrowed: Tensors by name (`embed_tokens`, `lm_head`) that our drafters take from the target: they must be the
            target's, the head's rows those of the state's `d2t` where it has one.
        other_row: The row of that embedding that is the drafter's own mask.
        assumed: What the checkpoint does not say, and is taken for so; sentences without a full stop.
    """

    kind: str
    options: dict[str, Any]
    state: dict[str, Tensor]
    borrowed: dict[str, Tensor] = field(default_factory=dict)
    other_row: int | None = None
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why a layout cannot express some drafters of a kind that it takes.

    Args:
        drafters: Which ones, in words for the documents.
        applies: Whether a config is one of these.
        why: For `str.format` with the drafter's `config`.
        recipe_line: What would make it expressible.
    """

    drafters: str
    applies: Callable[[DrafterConfig], Any]
    why: str
    recipe_line: str

    def sentence(self, config: DrafterConfig) -> str:
        return f"{self.why.format(config=config)}: train with {self.recipe_line}"


def has_plain_logits(config: DrafterConfig) -> bool:
    """Whether the logits are what a head gives: the drafter's own, or that of a target that changes nothing."""
    return config.has_own_heads or config.target_logits.is_plain


def has_uncapped_logits(config: DrafterConfig) -> bool:
    """Whether a reader of `logit_scale` makes the same logits, as vLLM's EAGLE classes do."""
    return config.has_own_heads or config.target_logits.cap is None


def has_targets_class(config: DrafterConfig) -> bool:
    """Whether the logits are right in a model of the target's own class."""
    return has_plain_logits(config) or config.layers == "target"


OTHER_LOGITS = Refusal(
    "a target that scales or caps its logits",
    lambda config: True,
    "its logits are those of the target's LM head, which are {config.target_logits}, and the reader's are not",
    "drafter.kind=eagle3 and drafter.options.draft_vocab_size, for a head of its own",
)


@dataclass(frozen=True)
class Exporter:
    """How drafters of one kind are written in one format, and read back.

    Args:
        write, read: The two directions.
        refusals: What the layout cannot express; the first one that applies is told.
        method: The engine's name for it; empty if there is no server.
        parallel: Whether all depths come from one forward.
        needs_target: Whether writing a drafter of this config takes tensors of the target.
        in_blocks: Whether its config says how many tokens are drafted, always all of them.
        weights_file: Where its reader looks for tensors.
        has_logits_of: Whether its reader makes of a drafter's head what this config's target does, see
            `models/target_logits.py`.
    """

    write: Callable[[Drafter], Checkpoint]
    read: Callable[[Checkpoint, Mapping[str, Any]], Parameters]
    refusals: tuple[Refusal, ...]
    method: str = ""
    parallel: bool = False
    needs_target: Callable[[DrafterConfig], bool] = lambda config: False
    in_blocks: bool = False
    weights_file: str = "model.safetensors"
    has_logits_of: Callable[[DrafterConfig], bool] = has_plain_logits


def drafted_tokens(config: DrafterConfig) -> int:
    """Return how many tokens a chain of this drafter drafts."""
    return getattr(config, "draft_depth", None) or config.num_depths


def config_of_speculators(drafter: Drafter, kind: str) -> dict[str, Any]:
    """What every config of the speculators library says of its kind, and of the target."""
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
    """Need the target for every drafter, for `Exporter.needs_target`."""
    return True


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str], back: bool = False) -> dict[str, Tensor]:
    """Give tensors the names that a layout has for them, or with `back` ours.

    Args:
        names: Beginnings of names, ours to theirs, `#` for a number; the first that fits is replaced.
    """
    pairs = [(theirs, ours) if back else (ours, theirs) for ours, theirs in names.items()]
    patterns = [(re.compile(re.escape(old).replace(r"\#", r"(\d+)")), new) for old, new in pairs]
    found = {}
    for name, value in tensors.items():
        for old, new in patterns:
            if match := old.match(name):
                for number in match.groups():
                    new = new.replace("#", number, 1)
                name = new + name[match.end() :]
                break
        found[name] = value
    return found


def only(option: str, value: Any, why: str, otherwise: str = "") -> Refusal:
    """Refuse drafters whose option has another value.

    Args:
        otherwise: Another recipe line that would help.
    """
    wanted = json.dumps(value).strip('"')
    line = f"drafter.options.{option}={wanted}" + (f", or {otherwise}" if otherwise else "")
    return Refusal(f"`{option}` other than {wanted}", lambda config: getattr(config, option, value) != value, why, line)


def no_scaled_embeddings(why: str, layers: Collection[str] = ("target", *OTHER_KINDS)) -> Refusal:
    """Refuse drafters with such `layers` for Gemma's targets, whose embeddings are scaled as they are read."""

    def applies(config: DrafterConfig) -> bool:
        return config.target_config["model_type"].startswith("gemma") and config.layers in layers

    otherwise = "drafter.kind=draft_model" if "target" in layers else "drafter.options.layers=target"
    return Refusal("a target with scaled embeddings", applies, f"this target scales embeddings, {why}", otherwise)


def no_layers(model_type: str, why: str) -> Refusal:
    """Refuse drafters with layers of this `model_type`."""
    return Refusal(f"{model_type}'s layers", lambda config: config.layers_of["model_type"] == model_type, why, LLAMAS)


def no_layers_but(model_types: Collection[str], why: str) -> Refusal:
    """Refuse drafters with layers of other types, or with another activation than silu."""

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


def _has_biases(layers_of: Mapping[str, Any]) -> bool:
    """Whether queries, keys and values have biases."""
    return layers_of["model_type"] == "qwen2" or bool(layers_of.get("attention_bias"))


def llama_config(config: DrafterConfig, num_layers: int, dtype: str) -> dict[str, Any]:
    """Make a `config.json` of `num_layers` layers of the drafter's kind, with the target's vocabulary, untied."""
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


def with_output_biases(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Add zeros for the output biases that Llama's classes have wherever they have biases, and Qwen 2 has not."""
    if not config["attention_bias"]:
        return tensors
    missing = {
        name.removesuffix("weight") + "bias": weight.new_zeros(len(weight))
        for name, weight in tensors.items()
        if name.endswith("self_attn.o_proj.weight")
    }
    return {**missing, **tensors}


def without_zero_biases(state: dict[str, Tensor], layers_of: Mapping[str, Any]) -> dict[str, Tensor]:
    """Undo `with_output_biases`."""
    if layers_of["model_type"] != "qwen2":
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
    """Return the name of its dtype, `float32` and the like."""
    return str(drafter.dtype).removeprefix("torch.")


def config_differences(
    config: Mapping[str, Any], layers_of: Mapping[str, Any], exactly: bool, own_rope: bool = False
) -> list[str]:
    """List where a config, as transformers reads it, says something else of its layers than ours have.

    Args:
        layers_of: What ours are made from.
        exactly: Also compare keys that no output of ours depends on: the number of positions, the initial range.
        own_rope: Whether ours may have another RoPE.
    """
    ours, theirs = layers_config(layers_of, 1), _as_transformers_reads(config)
    found = []
    for key in LAYER_KEYS:
        if key == "rope_parameters" and own_rope:
            continue
        wanted, value = getattr(ours, key, None), getattr(theirs, key, None)
        if key == "head_dim":
            wanted = wanted or ours.hidden_size // ours.num_attention_heads
            value = value or theirs.hidden_size // theirs.num_attention_heads
        if key == "rope_parameters":
            wanted, value = _known(wanted), _known(value)
        if value != wanted and (exactly or key not in HARMLESS_KEYS):
            found.append(f"{key} is {value} where the target's layers have {wanted}")
    return found


def _as_transformers_reads(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Read the keys of a foreign config that its layers are made from."""
    model_type = config.get("model_type")
    values = {key: config[key] for key in (*LAYER_KEYS, "rope_theta", "rope_scaling") if config.get(key) is not None}
    return AutoConfig.for_model(model_type if model_type in SUPPORTED_MODEL_TYPES else "llama", **values)


def _known(rope: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (rope or {}).items() if value is not None}


def own_rope(checkpoint: Checkpoint, layers_of: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the option `rope`, if a foreign checkpoint's layers have another RoPE than ours, and what was assumed."""
    config = checkpoint.config
    ours = _known(layers_config(layers_of, 1).rope_parameters)
    theirs = _known(_as_transformers_reads(config).rope_parameters)
    if theirs == ours:
        return {}, ()
    theta = f"{theirs['rope_theta']:,.0f}"
    if config.get("rope_theta") is None and not config.get("rope_parameters"):
        return {"rope": theirs}, (f"its config names no rope_theta: {theta} was taken, as its readers do",)
    sentence = f"its layers have RoPE of their own ({theta}), where the target's have {ours.get('rope_theta', 0):,.0f}"
    return {"rope": theirs}, (f"{sentence}: it is kept as drafter.options.rope",)


def kind_of_layers(
    checkpoint: Checkpoint,
    target_config: Mapping[str, Any],
    kinds: Collection[str] = ("target", *OTHER_KINDS),
    with_own_rope: bool = False,
) -> str:
    """Which of these kinds the layers of a foreign checkpoint are of, see `of_kind`.

    Args:
        with_own_rope: Whether our drafters of this layout may have another RoPE than the target.

    Raises:
        UserError: They are not of the target's shape, the only one that our drafters have; or its vocabulary is not.
    """
    config = checkpoint.config
    differences, model_type = list[str](), config.get("model_type")
    biased = any(name.endswith("self_attn.q_proj.bias") for name in checkpoint.tensors)
    # Layers that have the target's RoPE come first.
    for another_rope, kind in itertools.product((False, True) if with_own_rope else (False,), kinds):
        layers_of = of_kind(kind, target_config)
        own = layers_of["model_type"]
        # Mistral's and Qwen 2's are written as Llama's.
        if own not in SUPPORTED_MODEL_TYPES or (own != model_type and "qwen3" in (own, model_type)):
            continue
        if another_rope and own != model_type and own not in LLAMA_LIKE:
            continue
        found = config_differences(config, layers_of, exactly=False, own_rope=another_rope)
        if biased != _has_biases(layers_of):
            found.append(f"attention has {'' if biased else 'no '}biases where the target's layers are otherwise")
        if config.get("vocab_size") != target_config["vocab_size"]:
            found.append(f"vocab_size is {config.get('vocab_size')} where the target has {target_config['vocab_size']}")
        if not found:
            return kind
        differences += [each for each in found if not (with_own_rope and each.startswith("rope_parameters"))]
    first = differences[0] if differences else f"layers are {model_type}'s"
    raise UserError(
        f"the checkpoint's {first}: drafters here have layers of the target's shape, so import one that was made for "
        "this target and has them"
    )
