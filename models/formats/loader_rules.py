"""What loaders do with a checkpoint, as data: the tensors that they ask for, by name and shape, and their traps.

Most loaders leave a missing tensor at random, or skip one that they do not know, without a word; then the drafter loads
and nothing is accepted. So every export is held against these rules, which were read off the loaders' sources and share
nothing with the code that writes a layout.

Dimensions: H hidden, T the target's hidden size, A layers of the target that are fused, I of the MLP, Q and KV heads
times head size, Dh head size, V vocabulary, W drafted tokens, R rank of a Markov head.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Where a P-EAGLE or PARD config may keep its mask token: vLLM 0.32, v1/spec_decode/llm_base_proposer.py:361-373.
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class TensorRule:
    """A tensor that a loader asks for, or many whose names differ in numbers.

    Args:
        name: With `{i}`, `{j}` for numbers.
        shape: Dimensions, as the module's docstring names them, `i+2` with the first number, or products of these.
        ranges: First and one past the last of each number: numbers, or names of counts.
        when: A fact about the config that must hold, or must not if it begins with `not `.
    """

    name: str
    shape: tuple[str, ...]
    ranges: tuple[tuple[int | str, int | str], ...] = ()
    when: str | None = None

    def expand(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shapes by name for this config; none where `when` does not hold."""
        if self.when is not None:
            fact = self.when.removeprefix("not ")
            if facts(config)[fact] == self.when.startswith("not "):
                return {}
        sizes = dimensions(config)
        counts = [range(*(_size(str(end), sizes) for end in ends)) for ends in self.ranges]
        found = {}
        for chosen in itertools.product(*counts):
            numbers = dict(zip("ij", chosen, strict=False))
            known = {**sizes, "i+2": numbers.get("i", 0) + 2}
            found[self.name.format(**numbers)] = tuple(_size(dimension, known) for dimension in self.shape)
        return found


@dataclass(frozen=True)
class LoaderRules:
    """One loader of one engine.

    Args:
        engine: Name and version that the rules were read off.
        source: File and lines of it.
        tensors: All must be there.
        optional: May be there; without them the target's own are shared.
        traps: What becomes of other tensors that one might write, by name.
        config: Values that the config must have, by key.
        files: The weights file that is looked for.
    """

    engine: str
    source: str
    tensors: tuple[TensorRule, ...]
    optional: tuple[TensorRule, ...] = ()
    traps: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    weights_file: str = "model.safetensors"

    def complaints(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """What is wrong with a checkpoint of this config and these tensors, one sentence each; none if it is right."""
        asked = _expanded(self.tensors, config)
        known = {**_expanded(self.optional, config), **asked}
        found = [f"{name} is missing" for name in sorted(asked.keys() - shapes.keys())]
        for name, shape in sorted(shapes.items()):
            if name not in known:
                found.append(f"{name} {self.traps.get(name, 'is not known to it and skipped without a word')}")
            elif tuple(shape) != known[name]:
                found.append(f"{name} is {tuple(shape)} where it asks for {known[name]}")
        for key, wanted in self.config.items():
            if config.get(key) != wanted:
                found.append(f"the config's {key} is {config.get(key)!r} where it asks for {wanted!r}")
        return [f"{self.engine} ({self.source}): {sentence}" for sentence in found]


def _expanded(rules: tuple[TensorRule, ...], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: shape for rule in rules for name, shape in rule.expand(config).items()}


def dimensions(config: Mapping[str, Any]) -> dict[str, int]:
    """Sizes and counts by name, as far as the config tells them."""
    hidden = config["hidden_size"]
    heads = config.get("num_attention_heads", 1)
    head_size = config.get("head_dim") or hidden // heads
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    blocks = config.get("medusa_num_layers") or config.get("hydra_num_layers") or 1
    ids = ids or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = ids or (config.get("dflash_config") or config).get("target_layer_ids") or [0, 0, 0]
    rank = config.get("markov_rank") or 0
    return {
        "H": hidden,
        "T": config.get("target_hidden_size") or hidden,
        "A": config.get("num_aux_hidden_states") or len(ids),
        "I": config.get("intermediate_size", 0),
        "Q": heads * head_size,
        "KV": config.get("num_key_value_heads", heads) * head_size,
        "Dh": head_size,
        "V": config.get("vocab_size", 0),
        "W": config.get("draft_vocab_size") or config.get("vocab_size", 0),
        "layers": config.get("num_hidden_layers", 1),
        "heads": config.get("num_heads") or config.get("medusa_num_heads") or config.get("hydra_num_heads") or 0,
        "R": rank,
        "H+R": hidden + rank,
        "blocks": blocks,
        "behind blocks": blocks + 1,
    }


def facts(config: Mapping[str, Any]) -> dict[str, bool]:
    """What `TensorRule.when` may ask."""
    drafted, nested = config.get("draft_vocab_size"), config.get("eagle_config") or {}
    return {
        "attention bias": bool(config.get("attention_bias")),
        "mlp bias": bool(config.get("mlp_bias")),
        "q/k norms": config.get("model_type") == "qwen3",
        "reduced": drafted is not None and drafted != config.get("vocab_size"),
        "fc norm": bool(config.get("fc_norm")),
        "norm before fc": bool(nested.get("norm_before_fc", config.get("norm_before_fc"))),
        "masks": any(config.get(key) is not None for key in MASK_TOKEN_KEYS),
        "one head": bool(config.get("original_lm_head")),
        "head bias": bool(config.get("medusa_fc_bias")),
        "fc bias": bool(config.get("bias")),
        "confidence": bool(config.get("enable_confidence_head")),
    }


def _size(dimension: str, sizes: Mapping[str, int]) -> int:
    """`3`, `H` or `2H`; factors are joined by `*`."""
    product = 1
    for factor in dimension.split("*"):
        digits = factor[: len(factor) - len(factor.lstrip("0123456789"))]
        product *= int(digits or 1) * (sizes[factor[len(digits) :]] if factor[len(digits) :] else 1)
    return product


def llama_layer(prefix: str, width: str, norms: tuple[str, ...], ranges: Any = ()) -> tuple[TensorRule, ...]:
    """A decoder layer of Llama's kind (and Qwen's, with its q/k norms), whose attention reads `width`."""
    attention = {"q_proj": ("Q", width), "k_proj": ("KV", width), "v_proj": ("KV", width), "o_proj": ("H", "Q")}
    mlp = {"gate_proj": ("I", "H"), "up_proj": ("I", "H"), "down_proj": ("H", "I")}
    matrices = {
        **{f"self_attn.{name}": (shape, "attention bias") for name, shape in attention.items()},
        **{f"mlp.{name}": (shape, "mlp bias") for name, shape in mlp.items()},
    }
    rules = [TensorRule(f"{prefix}.{name}.weight", shape, ranges) for name, (shape, _) in matrices.items()]
    rules += [TensorRule(f"{prefix}.{name}.bias", shape[:1], ranges, when) for name, (shape, when) in matrices.items()]
    rules += [
        TensorRule(f"{prefix}.self_attn.{name}.weight", ("Dh",), ranges, "q/k norms") for name in ("q_norm", "k_norm")
    ]
    rules += [TensorRule(f"{prefix}.{name}.weight", ("H",), ranges) for name in norms]
    return tuple(rules)
