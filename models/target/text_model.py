"""The text model of a checkpoint: its class, its attention implementation, and its extraction from a wrapper.

Some checkpoints hold text and vision (Gemma 3, Mistral 3): the wrapper is loaded, and its text model is used alone,
with the wrapper's weights, as a causal language model.
"""

import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.models.target.view import is_wrapper
from draftsmith.models.target.windows import get_windows

EAGER, SDPA = "eager", "sdpa"
# Attributes of attention layers whose terms transformers' `sdpa` silently drops.
NOT_IN_SDPA = {"sinks": "attention sinks", "attn_logit_softcapping": "a soft cap of its attention's scores"}
TRIED_IDS = 6
TOLERANCE_FRAC = 0.02


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class that reads a checkpoint with this config."""
    if (
        type(config) not in AutoModelForCausalLM._model_mapping
        and type(config) in AutoModelForImageTextToText._model_mapping
    ):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def name_base_model(target: PreTrainedModel) -> None:
    """Correct `base_model_prefix` of a text model whose class has its wrapper's prefix, such as Llama 4's."""
    if target.base_model is target and isinstance(getattr(target, "model", None), PreTrainedModel):
        target.base_model_prefix = "model"


def is_bidirectional(config: PreTrainedConfig) -> bool:
    """Return True if the model is an encoder, of a class that could also be a decoder, such as BERT."""
    could_be_either = any("is_decoder" in vars(each).get("__annotations__", {}) for each in type(config).__mro__)
    return could_be_either and not getattr(config, "is_decoder", False)


def choose_attention(config: PreTrainedConfig, requested: str) -> str:
    """Return the requested attention implementation, or `eager` if the target's class does not support it."""
    mapping = auto_class(config)._model_mapping
    known = type(config) in mapping
    return EAGER if requested == SDPA and known and not mapping[type(config)]._supports_sdpa else requested


def use_exact_attention(target: PreTrainedModel) -> None:
    """Switch from `sdpa` to `eager` if `sdpa` drops a term of this target's attention."""
    if dropped_by_sdpa(target) and str(target.config._attn_implementation) != EAGER:
        target.set_attn_implementation(EAGER)


def use_configured_time_steps(target: PreTrainedModel) -> None:
    """Limit the time steps of Mamba-2 layers by the config's `time_step_limit`, as published models do.

    Nemotron-H and Zamba2 of transformers 5.19 take `time_step_min` as the limit, which is for initialization, and apply
    it to forwards of several tokens only: a draft would be verified by another model than the one that answers.
    """
    limit = getattr(target.config.get_text_config(), "time_step_limit", None) or (0.0, math.inf)
    for module in target.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(limit)


def dropped_by_sdpa(target: PreTrainedModel) -> list[str]:
    """List the terms of this target's attention that `sdpa` would leave out."""
    modules = [*target.modules()]
    return [
        term
        for name, term in NOT_IN_SDPA.items()
        if any(isinstance(getattr(module, name, None), float | int | torch.Tensor) for module in modules)
    ]


def attention_sentence(target: PreTrainedModel) -> str:
    """Return the name of the target's attention implementation, and why it is not `sdpa`."""
    name = str(target.config._attn_implementation)
    terms = dropped_by_sdpa(target)
    if name == EAGER and terms:
        return f"{EAGER}, as {SDPA} would drop {' and '.join(terms)}"
    return EAGER if name == EAGER else SDPA


def running_sentence(target: PreTrainedModel) -> str:
    """Describe the target's attention implementation and its sliding windows."""
    return f"attention by {attention_sentence(target)}; {get_windows(target).sentence()}"


def text_alone(model: PreTrainedModel, where: str) -> PreTrainedModel:
    """Return a wrapper's text model as a causal language model with the same tensors; other models unchanged.

    Args:
        where: The user's name of the target, for messages.

    Raises:
        UserError: transformers has no class for the text model alone, or it gives other logits than the wrapper.
    """
    config = model.config
    if not is_wrapper(config):
        return model
    with torch.device("meta"):
        text: Any = AutoModelForCausalLM.from_config(
            text_config(config, where), attn_implementation=config._attn_implementation
        )
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if head is None or type(decoder) is not type(text.base_model):
        raise _no_text_model(config, where)
    setattr(text, text.base_model_prefix, decoder)
    text.set_output_embeddings(head)
    text.generation_config = model.generation_config
    text.config.tie_word_embeddings = head.weight is text.get_input_embeddings().weight
    if any(tensor.is_meta for tensor in (*text.parameters(), *text.buffers())):
        raise _no_text_model(config, where)
    _check_same_logits(model.eval(), text.eval(), where)
    return text


def text_config(config: PreTrainedConfig, where: str) -> PreTrainedConfig:
    """Return the config of a checkpoint's text model as a causal language model.

    Raises:
        UserError: transformers has no class for the text model alone.
    """
    text = config.get_text_config()
    if is_wrapper(config):
        if type(text) not in AutoModelForCausalLM._model_mapping:
            raise _no_text_model(config, where)
        text.architectures = text.architectures or config.architectures
        text._name_or_path = config._name_or_path
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def _no_text_model(config: PreTrainedConfig, where: str) -> UserError:
    return UserError(
        f"target.model {where} ({config.model_type}) holds text and more in one model, and transformers has no class "
        "for its text alone: use a checkpoint of the text model"
    )


@torch.no_grad()
def _check_same_logits(wrapper: PreTrainedModel, text: PreTrainedModel, where: str) -> None:
    """Compare the logits of wrapper and text model for a few tokens.

    Raises:
        UserError: The logits differ.
    """
    vocabulary = text.config.vocab_size
    ids = torch.arange(1, TRIED_IDS + 1, device=wrapper.device)[None] * (vocabulary // (TRIED_IDS + 1))
    whole, alone = (model(input_ids=ids, use_cache=False).logits.float() for model in (wrapper, text))
    if not float((whole - alone).abs().amax()) <= TOLERANCE_FRAC * float(whole.abs().amax()):
        raise UserError(
            f"the text model of target.model {where} gives other logits alone than in its {type(wrapper).__name__}: "
            "use a checkpoint of the text model"
        )
