"""The speculators library's layout: EAGLE-3's tensors under plain names, and a config that says how to serve them.

vLLM reads it too, the layers' keys from `transformer_layer_config`, where the number of fused layers must stand for it.
SGLang does not. `norm_before_residual` is always written: its default differs between the shapes and the readers. The
norms of EAGLE-3.1 stand in both places: vLLM takes P-EAGLE's `fc_norm` from the layers' keys alone.
"""

from typing import Any

from draftsmith.models.base.drafter import Drafter, DrafterConfig
from draftsmith.models.formats import eagle3
from draftsmith.models.formats.checkpoint import Checkpoint, Refusal
from draftsmith.models.formats.loader_rules import LoaderRules, TensorRule, llama_layer

RULES = LoaderRules(
    engine="vLLM 0.32's reader of speculators",
    source="transformers_utils/configs/speculators/algos.py:18-95, base.py:62-93",
    tensors=(
        *eagle3.COMMON,
        *eagle3.FEATURE_NORMS,
        *llama_layer("layers.0", "2*H", ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *eagle3.FURTHER_LAYERS,
        eagle3.OWN_HEAD,
        eagle3.D2T,
        eagle3.T2D,
        TensorRule("mask_hidden", ("1", "1", "A*T"), when="masks"),
    ),
    optional=(eagle3.EMBEDDING,),
    config={"tie_word_embeddings": False},
)


def refusal(config: DrafterConfig) -> Refusal | None:
    return eagle3.refusal_vllm(config)


def to_speculators(drafter: Drafter, tokens: int) -> Checkpoint:
    """With the target's LM head, where the drafter has none of its own: the library's class always has one.

    Args:
        tokens: To draft in a round.
    """
    written = eagle3.to_vllm(drafter)
    layers, kind = written.config, "peagle" if "mask_hidden" in written.tensors else "eagle3"
    layers["architectures"] = ["LlamaForCausalLM" if layers["model_type"] == "llama" else "Qwen3ForCausalLM"]
    top = {key: layers.pop(key) for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    if kind == "peagle":
        top["mask_token_id"] = layers.pop("mask_token_id")
        del layers["pard_token"]
    config: dict[str, Any] = {
        "architectures": ["PEagleSpeculator" if kind == "peagle" else "Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {
                "name_or_path": drafter.config.target_name_or_path,
                "architectures": drafter.config.target_config.get("architectures") or [],
            },
        },
        "transformer_layer_config": layers,
        "norm_before_residual": layers.pop("norm_before_residual"),
        **{key: layers[key] for key in eagle3.NORMS},
        "tie_word_embeddings": False,
        "dtype": layers["dtype"],
        **top,
    }
    tensors = {name.replace("midlayer.", "layers.0.", 1): value for name, value in written.tensors.items()}
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = eagle3.target_head(drafter)
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].unsqueeze(0)
    return Checkpoint(config, tensors)


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """Such a config as EAGLE-3's; others as they are."""
    if "speculators_model_type" not in config:
        return config
    layers = config["transformer_layer_config"]
    # The two readers agree on EAGLE-3's default and on P-EAGLE's.
    default = config["speculators_model_type"] == "eagle3"
    return {"norm_before_residual": default, **config, **layers}
