"""DFlash's layout, and DSpark's, which adds a Markov head and a confidence head to it.

Ours is this layout, name by name. Its layers are Qwen 3's whatever the target's are, embedding and head are the
target's; of a draft vocabulary, which vLLM alone knows, the target's rows of the head go along. Engines count the
layers that are read from 0 by their *outputs*: their id is one less than ours.

Shapes: H hidden, T the target's hidden size, A layers that are read, V vocabulary, W drafted tokens, R rank.
"""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from draftsmith.models.base.draft_vocabulary import DraftVocabulary
from draftsmith.models.base.drafter import Drafter, DrafterConfig
from draftsmith.models.formats.checkpoint import (
    Checkpoint,
    Parameters,
    Refusal,
    drafted_of_all,
    dtype_name,
    llama_config,
    refuse_other_layers,
    take_borrowed,
)
from draftsmith.models.formats.loader_rules import LoaderRules, TensorRule, llama_layer
from draftsmith.models.groups.layers import qwen3_layers_config

SCALED_EMBEDDINGS = ("gemma",)
NORMS = ("input_layernorm", "post_attention_layernorm")
TENSORS = (
    TensorRule("fc.weight", ("H", "A*T")),
    TensorRule("hidden_norm.weight", ("H",)),
    TensorRule("norm.weight", ("H",)),
    *llama_layer("layers.{i}", "H", NORMS, ((0, "layers"),)),
)
MARKOV_HEAD = (
    TensorRule("markov_head.markov_w1.weight", ("V", "R")),
    TensorRule("markov_head.markov_w2.weight", ("W", "R")),
)
CONFIDENCE_HEAD = (
    TensorRule("confidence_head.proj.weight", ("1", "H+R"), when="confidence"),
    TensorRule("confidence_head.proj.bias", ("1",), when="confidence"),
)
FEWER_TOKENS = (
    TensorRule("d2t", ("W",), when="reduced"),
    TensorRule("t2d", ("V",), when="reduced"),
    TensorRule("lm_head.weight", ("W", "H"), when="reduced"),
)
EMBEDDING = TensorRule("embed_tokens.weight", ("V", "H"))
CONFIG = {"model_type": "qwen3", "attention_bias": False, "hidden_act": "silu"}
NO_MASK_HIDDEN = {"mask_hidden": "is refused: masks are a token's embedding"}

VLLM = LoaderRules(
    engine="vLLM 0.32 dflash",
    source="model_executor/models/qwen3_dflash.py: DFlashQwen3Model, DFlashQwen3ForCausalLM.load_weights",
    tensors=(*TENSORS, *FEWER_TOKENS),
    optional=(EMBEDDING,),
    traps=NO_MASK_HIDDEN,
    config={**CONFIG, "architectures": ["DFlashDraftModel"]},
)
SGLANG = LoaderRules(
    engine="SGLang 0.5.23 DFLASH",
    source="srt/models/dflash.py: DFlashDraftModel",
    tensors=TENSORS,
    config={**CONFIG, "architectures": ["DFlashDraftModel"]},
)

DSPARK = {"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": True, "markov_head_type": "vanilla"}
DSPARK_VLLM = LoaderRules(
    engine="vLLM 0.32 dspark",
    source="model_executor/models/qwen3_dspark.py: Qwen3DSparkModel, Qwen3DSparkForCausalLM.load_weights",
    tensors=(*TENSORS, *FEWER_TOKENS, *MARKOV_HEAD, *CONFIDENCE_HEAD),
    optional=(EMBEDDING,),
    traps=NO_MASK_HIDDEN,
    config={**CONFIG, **DSPARK},
)
DSPARK_SGLANG = LoaderRules(
    engine="SGLang 0.5.23 DSPARK",
    source="srt/models/dspark.py: Qwen3DSparkModel",
    tensors=(*TENSORS, *MARKOV_HEAD, *CONFIDENCE_HEAD),
    config={**CONFIG, **DSPARK},
)


def refusal_dspark_vllm(config: DrafterConfig) -> Refusal | None:
    refused = _refuse_what_no_block_has(config)
    if refused is None and not config.sample_from_anchor:
        behind = "drafter.options.sample_from_anchor=true"
        return Refusal("engines draft DSpark's first token from the newest one's row", behind)
    return refused


def refusal_dspark_sglang(config: DrafterConfig) -> Refusal | None:
    return refusal_dspark_vllm(config) or _refuse_what_sglang_has_not(config)


def _refuse_what_no_block_has(config: DrafterConfig) -> Refusal | None:
    if config.target_config["model_type"] in SCALED_EMBEDDINGS:
        return Refusal("this target scales embeddings, and engines do not for a block", "drafter.kind=draft_model")
    if config.mask_residual:
        return Refusal("engines do not add the newest token to its masks", "drafter.options.mask_residual=false")
    return None


def refusal_vllm(config: DrafterConfig) -> Refusal | None:
    refused = _refuse_what_no_block_has(config)
    if refused is not None:
        return refused
    if config.markov_rank:
        return Refusal("DFlash has no Markov head", "drafter.options.markov_rank=0, or drafter.kind=dspark")
    if config.sample_from_anchor:
        at_it = "drafter.options.sample_from_anchor=false, or drafter.kind=dspark"
        return Refusal("engines draft from DFlash's masks, not from the newest token's row", at_it)
    return None


def refusal_sglang(config: DrafterConfig) -> Refusal | None:
    return refusal_vllm(config) or _refuse_what_sglang_has_not(config)


def _refuse_what_sglang_has_not(config: DrafterConfig) -> Refusal | None:
    if config.draft_vocab_size is not None:
        everything = "drafter.options.draft_vocab_size=null"
        return Refusal("SGLang's blocks are read off the target's whole head", everything)
    if config.causal:
        return Refusal("in SGLang's blocks every row sees every row", "drafter.options.causal=false")
    return None


def has_draft_vocabulary(config: DrafterConfig) -> bool:
    """Whether rows of the target's head go along."""
    return config.draft_vocab_size is not None


# ---- ours to theirs ----


def to_dflash(drafter: Drafter) -> Checkpoint:
    """For both engines."""
    return Checkpoint({**_config(drafter), "architectures": ["DFlashDraftModel"]}, _tensors(drafter))


def to_dspark(drafter: Drafter) -> Checkpoint:
    """For both engines; keys stand at the top, where both look for them."""
    has_confidence = bool(drafter.config.confidence_weight)
    own = {
        **DSPARK,
        "mask_token_id": drafter.config.mask_token_id,
        "markov_rank": drafter.config.markov_rank,
        "enable_confidence_head": has_confidence,
        "confidence_head_with_markov": has_confidence,
    }
    return Checkpoint({**_config(drafter), **own}, _tensors(drafter))


def _tensors(drafter: Drafter) -> dict[str, Tensor]:
    tensors = dict(drafter.state_dict())
    if has_draft_vocabulary(drafter.config):
        tensors["lm_head.weight"] = cast(DraftVocabulary, drafter).borrowed_head.weight.to(drafter.dtype)
    return tensors


def _config(drafter: Drafter) -> dict[str, Any]:
    ours = drafter.config
    config = llama_config(ours, ours.num_layers, dtype_name(drafter), qwen3_layers_config)
    reduced = {"draft_vocab_size": ours.draft_vocab_size} if has_draft_vocabulary(ours) else {}
    return {
        **config,
        **reduced,
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * ours.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "block_size": ours.block_size,
        "num_target_layers": ours.target_config["num_hidden_layers"],
        "dflash_config": {
            "mask_token_id": ours.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in ours.feature_layers],
            "causal": ours.causal,
        },
    }


# ---- theirs to ours ----


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Of either engine's.

    Raises:
        UserError: It was made for a target of another shape.
    """
    config, state = checkpoint.config, dict(checkpoint.tensors)
    refuse_other_layers(config, target_config, qwen3_layers_config)
    known = {**config, **(config.get("dflash_config") or {})}
    options = {
        "block_size": known["block_size"],
        "num_layers": known["num_hidden_layers"],
        "feature_layers": [layer + 1 for layer in known["target_layer_ids"]],
        "mask_token_id": known["mask_token_id"],
        "causal": bool(known.get("causal", False)),
    }
    borrowed = take_borrowed(state)
    if "d2t" in state:
        options["draft_vocab_size"] = len(state["d2t"])
        state["t2d"] = drafted_of_all(state["d2t"], target_config["vocab_size"])
    if "markov_head.markov_w1.weight" not in state:
        return Parameters("dflash", options, state, borrowed)
    options["markov_rank"] = known["markov_rank"]
    options["sample_from_anchor"] = bool(known.get("sample_from_anchor", True))
    if "confidence_head.proj.weight" not in state:
        options["confidence_weight"] = 0.0
    return Parameters("dspark", options, state, borrowed)
