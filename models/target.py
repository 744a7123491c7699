"""The target model p: loaded once, frozen, and asked for the features that drafters read.

Shapes: B batch, S sequence, D hidden.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetRecipe

EMBEDDED_TARGET = Path(__file__).resolve().parent / "embedded_target"


def load_target(recipe: TargetRecipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target in eval mode with frozen weights, on its device, and its tokenizer.

    Raises:
        UserError: The model cannot be found or read, is not decoder-only, or its tokenizer has no chat template.
    """
    location = target_location(recipe)
    where = {"revision": recipe.revision, "trust_remote_code": recipe.trust_remote_code}
    config = _read(location, lambda: AutoConfig.from_pretrained(location, **where))
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"target.model {recipe.model} is an encoder-decoder ({config.model_type}); speculative decoding here needs "
            "a decoder-only causal language model such as Llama or Qwen"
        )
    tokenizer = _read(location, lambda: AutoTokenizer.from_pretrained(location, **where))
    if recipe.chat_template is not None:
        tokenizer.chat_template = recipe.chat_template
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of target.model {recipe.model} has no chat template: set target.chat_template to its Jinja "
            "text, or use the chat-tuned version of the model"
        )
    dtype = "auto" if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    target = _read(
        location,
        lambda: AutoModelForCausalLM.from_pretrained(
            location, dtype=dtype, attn_implementation=recipe.attn_implementation, **where
        ),
    )
    if target.get_output_embeddings() is None or target.base_model is target:
        raise UserError(
            f"target.model {recipe.model} ({config.model_type}) has no LM head: use a causal language model"
        )
    return target.to(target_device(recipe)).eval().requires_grad_(False), tokenizer


def target_location(recipe: TargetRecipe) -> str:
    """The local folder or Hub id that `target.model` stands for."""
    if recipe.model == "embedded":
        if not (EMBEDDED_TARGET / "config.json").is_file():
            raise UserError(
                f"target.model embedded: {EMBEDDED_TARGET} holds no checkpoint; `make target` trains it again (hours)"
            )
        return str(EMBEDDED_TARGET)
    if _looks_like_a_path(recipe.model) and not Path(recipe.model).expanduser().is_dir():
        raise UserError(f"target.model {recipe.model} is not a folder: give a model folder, a Hub id, or `embedded`")
    folder = Path(recipe.model).expanduser()
    return str(folder) if folder.is_dir() else recipe.model


def target_device(recipe: TargetRecipe) -> torch.device:
    """The recipe's device, or CUDA if there is one, else CPU."""
    if recipe.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(recipe.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"target.device {recipe.device} cannot be used here ({reason}): try cpu") from None
    return device


@torch.no_grad()
def target_features(
    target: PreTrainedModel,
    input_ids_bs: Tensor,
    attention_mask_bs: Tensor | None = None,
    position_ids_bs: Tensor | None = None,
) -> Tensor:
    """[B, S, D]: what the LM head reads, after the final norm. One forward, no logits, no KV cache."""
    output = target.base_model(
        input_ids=input_ids_bs, attention_mask=attention_mask_bs, position_ids=position_ids_bs, use_cache=False
    )
    return output.last_hidden_state


def _looks_like_a_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def _read(location: str, load: Any) -> Any:
    """Call a `from_pretrained`, with its failures told in one sentence."""
    try:
        return load()
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if len(reason) > 300:
            reason = reason[:300] + " ..."
        raise UserError(
            f"target.model {location} cannot be loaded ({reason}): give a folder with a transformers checkpoint, a Hub "
            "id that this machine can reach, or `embedded`"
        ) from None
