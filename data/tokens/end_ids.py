"""The tokens that end an answer."""

from typing import Any

from transformers import GenerationConfig

from draftsmith.data.tokens.chat_tokens import template_end_token
from draftsmith.recipes.errors import UserError


def answer_end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer of this model."""
    return end_ids_of(model.generation_config, tokenizer)


def end_ids_of(generation_config: GenerationConfig, tokenizer: Any) -> list[int]:
    """The eos tokens of model and tokenizer, and the one that the chat template writes."""
    of_model = generation_config.eos_token_id
    candidates = [*(of_model if isinstance(of_model, list) else [of_model]), tokenizer.eos_token_id]
    candidates.append(template_end_token(tokenizer))
    end_ids = sorted({token_id for token_id in candidates if token_id is not None})
    if not end_ids:
        raise UserError(
            "the target has no end-of-sequence token (generation_config, tokenizer and chat template name none): "
            "set tokenizer.eos_token and save the tokenizer beside the model"
        )
    return end_ids
