"""EAGLE-1's layout, which ours is: `fc` and one decoder layer without input norm; embedding and head are the target's.

The bias of `fc` is where readers differ: vLLM drops it without a word, SGLang always has one, the authors' code has one
unless the config says `bias: false`. vLLM reads the same key as the attention's bias, so it is not written for it.
"""

from collections.abc import Mapping
from typing import Any

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.layout import (
    LLAMA_LIKE,
    NO_ATTENTION_BIAS,
    Checkpoint,
    Exporter,
    Parameters,
    dtype_name,
    llama_config,
    no_target,
    no_target_but,
    only,
    refuse_other_layers,
    take_borrowed,
    with_output_biases,
    without_zero_biases,
)

REFUSALS = (
    no_target("qwen3", "its Llama layer has no q/k norms, which this target's layers have", "eagle3"),
    no_target_but(LLAMA_LIKE, "its Llama layer does not run {config.target_config[model_type]}'s layers"),
    only("draft_vocab_size", None, "EAGLE's layout has no draft vocabulary", "drafter.kind=eagle3"),
)
FC_BIAS = only("fc_bias", False, "vLLM drops the bias of fc without a word")


def to_vllm(drafter: Drafter) -> Checkpoint:
    written = _written(drafter, architectures=["LlamaForCausalLM"])
    return Checkpoint(written.config, with_output_biases(written.tensors, written.config))


def to_sglang(drafter: Drafter) -> Checkpoint:
    written = _written(drafter, architectures=["LlamaForCausalLMEagle"])
    fc = written.tensors["fc.weight"]
    written.tensors.setdefault("fc.bias", fc.new_zeros(len(fc)))
    return written


def to_authors(drafter: Drafter) -> Checkpoint:
    return _written(drafter, architectures=["LlamaForCausalLM"], bias=bool(drafter.config.fc_bias))


def _written(drafter: Drafter, **keys: Any) -> Checkpoint:
    config = llama_config(drafter.config, 1, dtype_name(drafter))
    return Checkpoint({**config, **keys}, dict(drafter.state_dict()))


def parameters(checkpoint: Checkpoint, target_config: Mapping[str, Any]) -> Parameters:
    """Read any of these layouts.

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


EXPORTERS = {
    ("eagle", "vllm"): Exporter(to_vllm, parameters, (*REFUSALS, FC_BIAS), "eagle"),
    ("eagle", "sglang"): Exporter(to_sglang, parameters, (*REFUSALS, NO_ATTENTION_BIAS), "EAGLE"),
    ("eagle", "eagle"): Exporter(to_authors, parameters, (*REFUSALS, NO_ATTENTION_BIAS)),
}
