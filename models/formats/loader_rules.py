"""What loaders ask of a checkpoint: tensors by name and shape, and values of the config.

Most loaders leave a missing tensor at random, or skip one that they do not know, without a word; then the drafter loads
and nothing is accepted. So every export is compared with these rules, which were read off the loaders' sources and
share nothing with the code that writes a layout.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Where a P-EAGLE or PARD config may keep its mask token: vLLM 0.32, v1/spec_decode/llm_base_proposer.py:361-373.
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class LoaderRules:
    """One loader of one engine.

    Args:
        engine: Name and version that the rules were read off.
        source: File and lines of it.
        tensors: Gives the tensors that must be there, for a config.
        optional: Gives those that may be there; without them the target's own are shared.
        config: Values that the config must have, by key.
        weights_file: The file that is looked for.
    """

    engine: str
    source: str
    tensors: Callable[[Config], Shapes]
    optional: Callable[[Config], Shapes] = lambda config: {}
    config: Config = field(default_factory=dict)
    weights_file: str = "model.safetensors"

    def complaints(self, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """List what is wrong with a checkpoint of this config and these tensors, one sentence each."""
        asked = self.tensors(config)
        known = {**self.optional(config), **asked}
        found = [f"{name} is missing" for name in sorted(asked.keys() - shapes.keys())]
        for name, shape in sorted(shapes.items()):
            if name not in known:
                found.append(f"{name} is not known to it: dropped without a word, or a load error")
            elif tuple(shape) != known[name]:
                found.append(f"{name} is {tuple(shape)} where it asks for {known[name]}")
        for key, wanted in self.config.items():
            if config.get(key) != wanted:
                found.append(f"the config's {key} is {config.get(key)!r} where it asks for {wanted!r}")
        return [f"{self.engine} ({self.source}): {sentence}" for sentence in found]


def fused_layers(config: Config) -> int:
    """Return how many layers of the target are read."""
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    ids = ids or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = ids or (config.get("dflash_config") or config).get("target_layer_ids") or [0, 0, 0]
    return int(config.get("num_aux_hidden_states") or len(ids))


def draft_vocabulary_size(config: Config) -> int:
    """Return the size of the draft vocabulary, by default all tokens."""
    return int(config.get("draft_vocab_size") or config["vocab_size"])


def embedding(config: Config) -> Shapes:
    return {"embed_tokens.weight": (config["vocab_size"], config["hidden_size"])}


def own_head(config: Config) -> Shapes:
    return {"lm_head.weight": (draft_vocabulary_size(config), config["hidden_size"])}


def draft_vocabulary(config: Config) -> Shapes:
    """Maps from and to the target's tokens, where only a part of them is drafted."""
    drafted = draft_vocabulary_size(config)
    return {} if drafted == config["vocab_size"] else {"d2t": (drafted,), "t2d": (config["vocab_size"],)}


def llama_layer(config: Config, prefix: str, width: int, norms: tuple[str, ...]) -> Shapes:
    """A decoder layer of Llama's kind (and Qwen's, with its q/k norms), whose attention reads `width`."""
    hidden, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_size, config.get("num_key_value_heads", heads) * head_size
    matrices = {
        "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }  # fmt: skip
    shapes: Shapes = {f"{prefix}.{name}.weight": shape for name, shape in matrices.items()}
    for name, shape in matrices.items():
        if config.get("attention_bias" if name.startswith("self_attn") else "mlp_bias"):
            shapes[f"{prefix}.{name}.bias"] = shape[:1]
    if config.get("model_type") == "qwen3":
        shapes |= {f"{prefix}.self_attn.{name}.weight": (head_size,) for name in ("q_norm", "k_norm")}
    return shapes | {f"{prefix}.{name}.weight": (hidden,) for name in norms}
