"""The tokens that end an answer: the model's, the tokenizer's and the chat template's."""

import pytest
from support import tiny_tokenizers as templates
from support.tiny_tokenizers import tiny_tokenizer
from transformers import GenerationConfig

from draftsmith.data.tokens.answer_spans import template_answer_lead
from draftsmith.data.tokens.chat_tokens import answer_end_ids, template_end_token
from draftsmith.recipes.errors import UserError


@pytest.mark.parametrize(
    ("template", "end", "lead"),
    [
        (templates.CHATML, "<|im_end|>", ""),
        (templates.LLAMA2, "</s>", " "),
        (templates.QWEN3, "<|im_end|>", "<think>\n\n</think>\n\n"),
        (templates.NO_END_TOKEN, None, ""),
    ],
)
def test_end_token_and_lead(template: str, end: str | None, lead: str) -> None:
    tokenizer = tiny_tokenizer(template)
    assert template_end_token(tokenizer) == (tokenizer.convert_tokens_to_ids(end) if end else None)
    assert template_answer_lead(tokenizer) == lead


def test_all_that_end_an_answer() -> None:
    """The model's eos (1 = </s>, also the tokenizer's), and the template's <|im_end|>, unknown to the model."""
    tokenizer = tiny_tokenizer(templates.CHATML)
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert answer_end_ids(GenerationConfig(eos_token_id=1), tokenizer) == sorted({1, im_end})
    assert answer_end_ids(GenerationConfig(eos_token_id=[2, 3]), tokenizer) == sorted({1, 2, 3, im_end})
    assert answer_end_ids(GenerationConfig(), tokenizer) == sorted({1, im_end})


def test_nothing_ends_an_answer() -> None:
    tokenizer = tiny_tokenizer(templates.NO_END_TOKEN)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"no end-of-sequence token .*: set tokenizer\.eos_token and save"):
        answer_end_ids(GenerationConfig(), tokenizer)
