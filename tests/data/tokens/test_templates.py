"""What the probes of a template say: the form of an answer, and templates that cannot be used."""

import pytest
from support import tiny_tokenizers as templates
from support.chat_families import LLAMA31, Family
from support.tiny_tokenizers import tiny_tokenizer

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.tokens.rows import tokenize_rows
from draftsmith.data.tokens.templates import render
from draftsmith.errors import UserError

ASKED = (Turn("user", "Say hi"), Turn("assistant", "Hello"))
TOOLS = ({"type": "function", "function": {"name": "f"}},)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template: use an instruct model, or set target.chat_template"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "drops or rewrites the question"),
        (templates.CHATML.replace("m.content", "m.content[0].text"), "drops or rewrites the question"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "drops or repeats an answer"),
        ("{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}", "drops or repeats an answer"),
    ],
)
def test_unusable_templates_are_refused(template: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tokenize_rows(tiny_tokenizer(template), Conversation("x", ASKED), 1000)


def test_named_templates_are_chosen_by_the_tools_of_a_conversation() -> None:
    tokenizer = Family(LLAMA31, "<|eot_id|>", "<|begin_of_text|>").tokenizer()
    tokenizer.chat_template = {"default": templates.CHATML, "tool_use": LLAMA31}
    assert render(tokenizer, ASKED[:1]).startswith("<|im_start|>user")
    assert "Given the following functions" in render(tokenizer, ASKED[:1], tools=TOOLS)
    for tools, end in (((), "<|im_end|>"), (TOOLS, "<|eot_id|>")):
        ((row,), _) = tokenize_rows(tokenizer, Conversation("x", ASKED, tools=tools), 1000)
        assert [tokenizer.decode(answer) for answer in row.answers()] == ["Hello" + end]
    tokenizer.chat_template = {"chat": templates.CHATML, "rag": templates.CHATML}
    with pytest.raises(UserError, match=r"chat templates named chat, rag and no default one: .* set target.chat_templ"):
        render(tokenizer, ASKED[:1])


def test_text_that_is_not_utf_8_is_reported() -> None:
    """A command line in Latin-1 gives such text."""
    with pytest.raises(UserError, match="is not valid UTF-8"):
        prompt_token_ids(tiny_tokenizer(templates.CHATML), [Turn("user", "caf\udce9")])
