"""The loss mask covers exactly the assistant's tokens and their end token, whatever the chat template (invariant 6)."""

import pytest
from support import tiny_tokenizers as templates
from support.chat_families import FAMILIES, FIELD_OF_THOUGHTS, QWEN3, Family
from support.tiny_tokenizers import tiny_tokenizer

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens.chat_tokens import prompt_token_ids, tokenize_conversation, tokenize_shortened
from draftsmith.data.tokens.loss_mask import TokenizedConversation, copies_in
from draftsmith.data.tokens.templates import joined_thoughts, missing_header_sentence
from draftsmith.errors import UserError

TWO_ROUNDS = Conversation(
    "two",
    (
        Turn("user", "Say hi"),
        Turn("assistant", "Hello there, ünï 👋"),
        Turn("user", "Hello there"),  # the user repeats words of the assistant: position decides, not text
        Turn("assistant", "Bye"),
    ),
)

# Written by hand: the text of each span with loss.
GOLDEN = {
    "ZEPHYR": ["Hello there, ünï 👋</s>", "Bye</s>"],
    "GENERATION": ["Hello there, ünï 👋<|im_end|>", "Bye<|im_end|>"],
    "HARMONY": [
        "<|channel|>final<|message|>Hello there, ünï 👋<|end|>",
        "<|channel|>final<|message|>Bye<|return|>",
    ],
    # "Bot: Hello" has a token " Hello" across the border; the target reads "Bot: " and generates "Hello".
    "NO_END_TOKEN": ["Hello there, ünï 👋", "Bye"],
}


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_masks(name: str, trim_offsets: bool) -> None:
    tokenizer = tiny_tokenizer(getattr(templates, name), trim_offsets)
    tokenized = tokenize_conversation(tokenizer, TWO_ROUNDS)
    assert [tokenizer.decode(run) for run in tokenized.answers()] == GOLDEN[name]
    rendered = tokenizer.apply_chat_template(TWO_ROUNDS.messages, tokenize=False)
    assert tokenizer.decode(tokenized.input_ids) == rendered
    if name != "NO_END_TOKEN":
        assert tokenized.input_ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("mark", ["{% generation %}", "{% generation%}", "{%generation-%}", "{%-  generation  %}"])
def test_every_form_of_the_generation_mark_is_found(mark: str) -> None:
    """What the template writes before it carries no loss."""
    tokenizer = tiny_tokenizer(templates.GENERATION.replace("{% generation %}", "(thoughts)" + mark))
    found = tokenize_conversation(tokenizer, TWO_ROUNDS).answers()
    assert [tokenizer.decode(run) for run in found] == GOLDEN["GENERATION"]


def test_answer_header_missing_from_the_generation_prompt() -> None:
    without = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '</s>\\n' }}{% endfor %}"
    assert "an answer (<|assistant|>) in no generation prompt" in missing_header_sentence(tiny_tokenizer(without))
    for name in ("ZEPHYR", "CHATML", "LLAMA3", "NO_END_TOKEN"):
        assert missing_header_sentence(tiny_tokenizer(getattr(templates, name))) == ""


@pytest.mark.parametrize(
    ("family", "joined"),
    [("Qwen3", "<think>\nhm\n</think>\n\nHello"), ("field", "<think>\nhm\n</think>\n\nHello"),
     ("R1", None), ("Llama 3", None), ("Qwen3, no thoughts", None)],
)  # fmt: skip
def test_separate_thoughts_join_the_answer(family: str, joined: str | None) -> None:
    assert joined_thoughts(({**FAMILIES, "field": FIELD_OF_THOUGHTS})[family].tokenizer(), "\nhm\n", "Hello") == joined


def test_opening_tag_in_the_prompt_carries_no_loss() -> None:
    """The target does not generate the end of its prompt."""
    opened = QWEN3.replace(
        "'<|im_start|>assistant\n' }}{% if enable", "'<|im_start|>assistant\n<think>\n' }}{% if enable"
    )
    assert joined_thoughts(Family(opened, "<|im_end|>").tokenizer(), "hm", "Hello") == "hm\n</think>\n\nHello"


def test_end_token_that_is_also_the_pad_token_carries_loss() -> None:
    tokenizer = tiny_tokenizer(templates.ZEPHYR)
    tokenizer.pad_token = "</s>"
    assert tokenize_conversation(tokenizer, TWO_ROUNDS).answers()[-1][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template: use an instruct model, or set tokenizer.chat_template"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out part of the last answer"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "drops or rewrites turn 2"),
        (
            "{% for m in messages %}{{ m.content if m.role == 'assistant' }}{% endfor %}",
            "makes every token an assistant token",
        ),
    ],
)
def test_unusable_templates_are_refused(template: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tokenize_conversation(tiny_tokenizer(template), TWO_ROUNDS)


def test_too_long_conversation_is_cut_at_a_turn_boundary() -> None:
    tokenizer = tiny_tokenizer(templates.CHATML)
    whole = tokenize_conversation(tokenizer, TWO_ROUNDS)
    first = tokenize_conversation(tokenizer, Conversation("first", TWO_ROUNDS.turns[:2]))
    assert tokenize_shortened(tokenizer, TWO_ROUNDS, len(whole.input_ids)) == (whole, 0)
    assert tokenize_shortened(tokenizer, TWO_ROUNDS, len(whole.input_ids) - 1) == (first, 2)
    assert tokenize_shortened(tokenizer, TWO_ROUNDS, len(first.input_ids) - 1) is None


@pytest.mark.parametrize(
    ("answer", "copied"),
    [
        ([*range(12), *range(12)], [0] * 12 + [1] * 12),
        ([*range(11), 50, *range(11), 51], [0] * 24),  # eleven in a row are too few for a copy
        ([*range(14), 50, *range(14), 51], [0] * 15 + [1] * 14 + [0]),  # new words after it are no copy
        ([7] * 13, [0] + [1] * 12),
        ([7] * 12, [0] * 12),
        ([3, 7, 8] + [7, 8] * 6 + [9], [0] * 3 + [1] * 12 + [0]),  # the first repetition of a loop
        ([], []),
    ],
)
def test_copies_are_found(answer: list[int], copied: list[int]) -> None:
    assert list(map(int, copies_in(answer))) == copied


def test_copies_are_searched_within_one_answer() -> None:
    said = list(range(5, 17))
    tokens = TokenizedConversation([1, *said, 2, 3, *said, *said, 2], [0] + [1] * 13 + [0] + [1] * 25)
    assert tokens.without_copies().loss_mask == [0] + [1] * 13 + [0] + [1] * 12 + [0] * 12 + [1]
    assert tokens.without_copies().input_ids == tokens.input_ids
    assert tokens.without_copies().with_copies() == tokens


@pytest.mark.parametrize(
    ("ids", "loss", "kept"),
    [  # 8 opens thoughts, 9 ends them, 2 ends an answer
        ([1, 8, 5, 9, 6, 2], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]),
        ([1, 8, 3, 5, 9, 6, 2], [0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]),  # the prompt opens thoughts
        ([1, 8, 5, 5], [0, 1, 1, 1], [0, 0, 0, 0]),  # cut
        ([1, 8, 9, 6, 2], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]),  # the prompt opens no thoughts
        ([8, 1, 1, 1, 6, 2], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]),  # the user mentions the tag
        ([1, 8, 5, 9, 6, 2, 1, 7, 8, 5, 9, 2], [0, *[1] * 5, 0, *[1] * 5], [0] * 4 + [1, 1, 0, 1, 0, 0, 0, 1]),
    ],
)
def test_thoughts_carry_no_loss(ids: list[int], loss: list[int], kept: list[int]) -> None:
    masked = TokenizedConversation(ids, loss).without_reasoning(8, 9)
    assert (masked.input_ids, masked.loss_mask) == (ids, kept)


def test_text_that_is_not_utf_8_is_reported() -> None:
    """A command line in Latin-1 gives such text."""
    with pytest.raises(UserError, match="is not valid UTF-8"):
        prompt_token_ids(tiny_tokenizer(templates.CHATML), [Turn("user", "caf\udce9")])
