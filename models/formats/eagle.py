"""EAGLE-1's layout, which ours is: `fc` and one decoder layer without input norm; embedding and head are the target's.

The bias of `fc` is where readers differ: vLLM drops it without a word, SGLang always has one, the authors' code has one
unless the config says `bias: false`. vLLM reads the same key as the attention's bias, so it is not written for it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draftsmith.models.base.drafter import Drafter, DrafterConfig
from draftsmith.models.formats.checkpoint import (
    LLAMA_LIKE,
    Checkpoint,
    Parameters,
    Refusal,
    dtype_name,
    llama_config,
    refuse_other_layers,
    take_borrowed,
    with_output_biases,
    without_zero_biases,
)
from draftsmith.models.formats.loader_rules import LoaderRules, TensorRule, llama_layer

FC, FC_BIAS = TensorRule("fc.weight", ("H", "2*H")), TensorRule("fc.bias", ("H",))
LAYER = llama_layer("layers.0", "H", ("post_attention_layernorm",))
EMBEDDING = TensorRule("embed_tokens.weight", ("V", "H"))
NO_INPUT_NORM = {"layers.0.input_layernorm.weight": "has no place: its first layer has no input norm"}

VLLM = LoaderRules(
    engine="vLLM 0.32 eagle",
    source="model_executor/models/llama_eagle.py:50-150, 181-190",
    tensors=(FC, *LAYER),
    optional=(EMBEDDING,),
    traps={
        **NO_INPUT_NORM,
        "lm_head.weight": "is a load error: the class has no head",
        "fc.bias": "is dropped without a word: its fc has none",
        "norm.weight": "is a load error: the class has no final norm",
    },
    config={
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    },
)  # fmt: skip
SGLANG = LoaderRules(
    engine="SGLang 0.5.23 EAGLE",
    source="srt/models/llama_eagle.py: LlamaForCausalLMEagle",
    tensors=(FC, FC_BIAS, *LAYER),
    optional=(EMBEDDING,),
    traps=NO_INPUT_NORM,
    config={"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "attention_bias": False},
)
AUTHORS = LoaderRules(
    engine="SafeAILab/EAGLE's EAGLE",
    source="eagle/model/cnets1.py:472-528, ea_model.py:45-49",
    tensors=(FC, TensorRule("fc.bias", ("H",), when="fc bias"), *LAYER),
    optional=(EMBEDDING,),
    traps=NO_INPUT_NORM,
    config={"model_type": "llama", "attention_bias": False, "num_hidden_layers": 1},
)


def refusal_vllm(config: DrafterConfig) -> Refusal | None:
    refused = _refuse_other_kinds(config, "vLLM's EagleLlamaForCausalLM")
    if refused is None and config.fc_bias:
        return Refusal("vLLM drops the bias of fc without a word", "drafter.options.fc_bias=false")
    return refused


def refusal_without_attention_bias(config: DrafterConfig) -> Refusal | None:
    """Of SGLang and of the authors' code."""
    refused = _refuse_other_kinds(config, "the reader's Llama layer")
    if refused is None and llama_config(config, 1, "")["attention_bias"]:
        return Refusal("the reader's EAGLE layer has no biases in the attention", "drafter.kind=draft_model")
    return refused


def _refuse_other_kinds(config: DrafterConfig, reader: str) -> Refusal | None:
    model_type = config.target_config["model_type"]
    if model_type == "qwen3":
        return Refusal(f"{reader} has no q/k norms, which this target's layers have", "drafter.kind=eagle3")
    if model_type not in LLAMA_LIKE or config.target_config.get("hidden_act", "silu") != "silu":
        return Refusal(f"{reader} does not run {model_type}'s layers", "drafter.kind=draft_model")
    if config.draft_vocab_size is not None:
        everything = "drafter.options.draft_vocab_size=null, or drafter.kind=eagle3"
        return Refusal("EAGLE's layout has no draft vocabulary", everything)
    return None


def to_vllm(drafter: Drafter) -> Checkpoint:
    config = {**_config(drafter), "architectures": ["LlamaForCausalLM"]}
    return Checkpoint(config, with_output_biases(_tensors(drafter), config))


def to_sglang(drafter: Drafter) -> Checkpoint:
    tensors = _tensors(drafter)
    tensors.setdefault("fc.bias", tensors["fc.weight"].new_zeros(len(tensors["fc.weight"])))
    return Checkpoint({**_config(drafter), "architectures": ["LlamaForCausalLMEagle"]}, tensors)


def to_authors(drafter: Drafter) -> Checkpoint:
    config = {**_config(drafter), "architectures": ["LlamaForCausalLM"], "bias": bool(drafter.config.fc_bias)}
    return Checkpoint(config, _tensors(drafter))


def _config(drafter: Drafter) -> dict[str, Any]:
    return llama_config(drafter.config, 1, dtype_name(drafter))


def _tensors(drafter: Drafter) -> dict[str, Tensor]:
    return dict(drafter.state_dict())


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Of any of these layouts.

    Raises:
        UserError: It was made for a target of another shape.
    """
    refuse_other_layers(checkpoint.config, target_config)
    state = without_zero_biases(dict(checkpoint.tensors), target_config)
    borrowed = take_borrowed(state)
    biased = "fc.bias" in state and bool(state["fc.bias"].any() or checkpoint.config.get("bias"))
    if not biased:
        state.pop("fc.bias", None)
    return Parameters("eagle", {"fc_bias": biased}, state, borrowed)
