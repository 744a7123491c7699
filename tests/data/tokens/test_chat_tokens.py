"""The loss mask covers exactly the assistant's tokens and their end token, whatever the chat template (invariant 6)."""

import pytest
from support import tiny_tokenizers as templates
from support.places import MATERIAL
from support.tiny_tokenizers import tiny_tokenizer
from transformers import AutoTokenizer

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens.answer_spans import TemplateProblem, TemplateRefusal
from draftsmith.data.tokens.chat_tokens import prompt_token_ids, tokenize_conversation, tokenize_shortened
from draftsmith.recipes.errors import UserError

TWO_ROUNDS = Conversation(
    "two",
    (
        Turn("user", "Say hi"),
        Turn("assistant", "Hello there, ünï 👋"),
        Turn("user", "Hello there"),  # the user says words of the assistant: position decides, not text
        Turn("assistant", "Bye"),
    ),
)
WITH_SYSTEM = Conversation("system", (Turn("system", "You are a helper."), *TWO_ROUNDS.turns))

# Written by hand: the text of each run of ones.
GOLDEN = {
    "CHATML": ["Hello there, ünï 👋<|im_end|>", "Bye<|im_end|>"],
    "CHATML_DEFAULT_SYSTEM": ["Hello there, ünï 👋<|im_end|>", "Bye<|im_end|>"],
    "LLAMA3": ["Hello there, ünï 👋<|eot_id|>", "Bye<|eot_id|>"],
    "LLAMA2": [" Hello there, ünï 👋 </s>", " Bye </s>"],
    "ZEPHYR": ["Hello there, ünï 👋</s>", "Bye</s>"],
    "GENERATION": ["Hello there, ünï 👋<|im_end|>", "Bye<|im_end|>"],
    "QWEN3": ["Hello there, ünï 👋<|im_end|>", "<think>\n\n</think>\n\nBye<|im_end|>"],
    "HARMONY": [
        "<|channel|>final<|message|>Hello there, ünï 👋<|end|>",
        "<|channel|>final<|message|>Bye<|return|>",
    ],
    "MISTRAL": [" Hello there, ünï 👋</s>", " Bye</s>"],
    # "Bot: Hello" would be tokenised with " Hello" across the border; the target reads "Bot: " and says "Hello".
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


@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in ("LLAMA2", "MISTRAL", "NO_END_TOKEN")])
def test_a_system_turn_carries_no_loss(name: str) -> None:
    tokenizer = tiny_tokenizer(getattr(templates, name))
    runs = tokenize_conversation(tokenizer, WITH_SYSTEM).answers()
    assert [tokenizer.decode(run) for run in runs] == GOLDEN[name]


def test_system_prompt_that_moves_to_the_last_user_turn() -> None:
    """Mistral v0.3: no generation prompt of the history is a prefix of the whole, the answers are found still."""
    tokenizer = tiny_tokenizer(templates.MISTRAL)
    runs = [tokenizer.decode(run) for run in tokenize_conversation(tokenizer, WITH_SYSTEM).answers()]
    assert runs == GOLDEN["MISTRAL"]


def test_what_follows_the_prompt_is_what_carries_loss() -> None:
    """Train = decode: the ids before the first answer are the prompt's ids, and the answer's follow at once."""
    for name in ("CHATML", "LLAMA3", "LLAMA2", "ZEPHYR", "GENERATION", "HARMONY", "NO_END_TOKEN"):
        tokenizer = tiny_tokenizer(getattr(templates, name))
        tokenized = tokenize_conversation(tokenizer, TWO_ROUNDS)
        for end in (1, 3) if name != "NO_END_TOKEN" else (1,):  # its history has " Hello" as one token again
            prompt = prompt_token_ids(tokenizer, TWO_ROUNDS.turns[:end])
            assert tokenized.input_ids[: len(prompt)] == prompt, name
            assert tokenized.loss_mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1], name


def test_no_double_bos() -> None:
    tokenizer = tiny_tokenizer(templates.LLAMA3)
    bos = tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    assert prompt_token_ids(tokenizer, TWO_ROUNDS.turns[:1]).count(bos) == 1
    assert tokenize_conversation(tokenizer, TWO_ROUNDS).input_ids.count(bos) == 1


def test_thoughts_stay_in_the_last_answer_and_leave_the_history() -> None:
    tokenizer = tiny_tokenizer(templates.QWEN3)
    thinking = Conversation(
        "think",
        (
            Turn("user", "a"),
            Turn("assistant", "<think>\nfirst\n</think>\n\nOne"),
            Turn("user", "b"),
            Turn("assistant", "<think>\nsecond\n</think>\n\nTwo"),
        ),
    )
    runs = tokenize_conversation(tokenizer, thinking).answers()
    assert [tokenizer.decode(run) for run in runs] == [
        "One<|im_end|>",
        "<think>\nsecond\n</think>\n\nTwo<|im_end|>",
    ]


def test_template_that_throws_thoughts_away_is_refused() -> None:
    tokenizer = tiny_tokenizer(templates.THOUGHTLESS)
    thinking = Conversation("think", (Turn("user", "a"), Turn("assistant", "because</think>One")))
    with pytest.raises(TemplateProblem, match="leaves out part of the last answer"):
        tokenize_conversation(tokenizer, thinking)
    plain = tokenize_conversation(tokenizer, TWO_ROUNDS).answers()
    assert [tokenizer.decode(run) for run in plain] == GOLDEN["CHATML"]


def test_a_pad_token_that_is_the_end_token_keeps_its_loss() -> None:
    tokenizer = tiny_tokenizer(templates.ZEPHYR)
    tokenizer.pad_token = "</s>"
    assert tokenize_conversation(tokenizer, TWO_ROUNDS).answers()[-1][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template: take an instruct model, or set tokenizer.chat_template"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out part of the last answer"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "drops or rewrites turn 2"),
        (
            "{% for m in messages %}{{ m.content if m.role == 'assistant' }}{% endfor %}",
            "makes every token an assistant token",
        ),
    ],
)
def test_unusable_templates(template: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tokenize_conversation(tiny_tokenizer(template), TWO_ROUNDS)


def test_template_that_refuses_system_turns() -> None:
    with pytest.raises(TemplateRefusal, match=r"roles system, user, assistant, user, \.\.\.: System role not"):
        tokenize_conversation(tiny_tokenizer(templates.LLAMA2), WITH_SYSTEM)


def test_over_long_is_cut_on_a_turn_boundary() -> None:
    tokenizer = tiny_tokenizer(templates.CHATML)
    whole = tokenize_conversation(tokenizer, TWO_ROUNDS)
    first = tokenize_conversation(tokenizer, Conversation("first", TWO_ROUNDS.turns[:2]))
    assert tokenize_shortened(tokenizer, TWO_ROUNDS, len(whole.input_ids)) == (whole, 0)
    assert tokenize_shortened(tokenizer, TWO_ROUNDS, len(whole.input_ids) - 1) == (first, 2)
    assert tokenize_shortened(tokenizer, TWO_ROUNDS, len(first.input_ids) - 1) is None


@pytest.mark.skipif(not (MATERIAL / "models" / "neo3m_chat").exists(), reason="../shared/material is not there")
def test_a_real_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MATERIAL / "models" / "neo3m_chat")
    tokenized = tokenize_conversation(tokenizer, TWO_ROUNDS)
    assert [tokenizer.decode(run) for run in tokenized.answers()] == [
        " Hello there, ünï 👋<|endoftext|>",
        " Bye<|endoftext|>",
    ]
