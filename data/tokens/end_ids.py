"""The tokens that end an answer."""

from typing import Any

from transformers import GenerationConfig

from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.tokens.answer_spans import PROBE
from draftsmith.data.tokens.chat_tokens import special_ids, tokenize_conversation
from draftsmith.recipes.errors import UserError


def answer_end_ids(generation_config: GenerationConfig, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: the eos tokens of model and tokenizer, and the one that the template writes.

    Raises:
        UserError: There is none, or the chat template cannot be used.
    """
    of_model = generation_config.eos_token_id
    of_model = of_model if isinstance(of_model, list) else [of_model]
    end_ids = sorted({*of_model, tokenizer.eos_token_id, template_end_token(tokenizer)} - {None})
    if not end_ids:
        raise UserError(
            "the target has no end-of-sequence token (generation_config, tokenizer and chat template name none): "
            "set tokenizer.eos_token and save the tokenizer beside the model"
        )
    return end_ids


def template_end_token(tokenizer: Any) -> int | None:
    """The token that ends an assistant turn in this template, or None where the template has none.

    It need not be among the model's eos tokens (a base model given a ChatML template): generation must stop at it too.
    """
    last = tokenize_conversation(tokenizer, Conversation("probe", PROBE)).answers()[-1][-1]
    return last if last in special_ids(tokenizer) else None
