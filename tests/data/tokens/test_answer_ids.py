"""If the ids that the target generated are known, a row has exactly these, after the prompts it was given."""

from dataclasses import replace

import pytest
from support.chat_families import FAMILIES
from transformers import PreTrainedTokenizerFast

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens.chat_tokens import prompt_token_ids, tokenize_conversation, tokenize_shortened
from draftsmith.data.tokens.templates import template_answer_lead
from draftsmith.errors import UserError

TALK = Conversation(
    "talk",
    (
        Turn("user", "Say hi"),
        Turn("assistant", "Hello there"),
        Turn("user", "Hello there"),
        Turn("assistant", "Say hi."),
        Turn("user", "bye"),
        Turn("assistant", "you are"),
    ),
)


def spell_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the ids of the letters, a split that the tokenizer does not make."""
    return [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in text]


def expected_ids(tokenizer: PreTrainedTokenizerFast, family: str, text: str, end: bool = True) -> list[int]:
    """Return the text's letters as ids, with the template's lead before them and the end token after."""
    ids = spell_ids(tokenizer, template_answer_lead(tokenizer) + text)
    return [*ids, tokenizer.convert_tokens_to_ids(FAMILIES[family].end)] if end else ids


def answered(conversation: Conversation, *ids: list[int] | None) -> Conversation:
    return replace(conversation, answer_ids=ids)


def talk_ids(tokenizer: PreTrainedTokenizerFast, family: str) -> list[list[int] | None]:
    return [expected_ids(tokenizer, family, turn.content) for turn in TALK.turns if turn.role == "assistant"]


# Of the others the history lacks text that ends the prompts or begins the answers.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "R1" and "Qwen3" not in family])
def test_tokens_with_loss_are_the_given_ids(family: str) -> None:
    tokenizer = FAMILIES[family].tokenizer()
    ids = talk_ids(tokenizer, family)
    tokenized = tokenize_conversation(tokenizer, answered(TALK, *ids))
    assert tokenized.answers() == ids
    assert tokenized.rewritten_turns == ()
    assert tokenized.input_ids != tokenize_conversation(tokenizer, TALK).input_ids
    first_prompt = prompt_token_ids(tokenizer, TALK.turns[:1])
    assert tokenized.input_ids[: len(first_prompt)] == first_prompt
    # The last answer follows the target's prompt and ends the row.
    alone = tokenize_conversation(tokenizer, answered(TALK, None, None, ids[2]))
    prompt = prompt_token_ids(tokenizer, TALK.turns[:-1])
    assert alone.input_ids == prompt + expected_ids(tokenizer, family, "you are")
    texts = {"".join(tokenizer.decode(tokens.input_ids).split()) for tokens in (tokenized, alone)}
    assert len(texts) == 1  # except for the space that Llama 2's template writes after an answer


@pytest.mark.parametrize("family", ["ChatML", "Llama 2", "Gemma 2", "Mistral v0.1"])
def test_cut_answer_has_no_end_token(family: str) -> None:
    tokenizer = FAMILIES[family].tokenizer()
    cut = expected_ids(tokenizer, family, "you are", end=False)
    ids = talk_ids(tokenizer, family)
    last = tokenize_conversation(tokenizer, answered(TALK, *ids[:2], cut))
    assert last.answers() == [*ids[:2], cut]
    assert last.input_ids[-len(cut) :] == cut  # nothing follows it
    cut = expected_ids(tokenizer, family, "Say hi.", end=False)
    middle = tokenize_conversation(tokenizer, answered(TALK, ids[0], cut, ids[2]))
    assert middle.answers() == [ids[0], cut, ids[2]]
    # In the history the template's end token follows, without loss.
    start = next(t for t in range(len(middle.input_ids)) if middle.input_ids[t : t + len(cut)] == cut)
    following = middle.input_ids[start + len(cut) : start + len(cut) + 2]
    assert tokenizer.decode(following).strip().startswith(FAMILIES[family].end)


def test_empty_think_block_is_kept_only_if_generated() -> None:
    """Qwen3's template writes one into the last answer; the generated ids count, with or without it."""
    tokenizer = FAMILIES["Qwen3"].tokenizer()
    one = Conversation("one", TALK.turns[:2])
    prompt = prompt_token_ids(tokenizer, one.turns[:1])
    for answer in ("Hello there<|im_end|>", "<think>\n\n</think>\n\nHello there<|im_end|>"):
        ids = tokenizer.encode(answer, add_special_tokens=False)
        tokenized = tokenize_conversation(tokenizer, answered(one, ids))
        assert tokenized.input_ids == prompt + ids
        assert tokenized.loss_mask == [0] * len(prompt) + [1] * len(ids)


def test_known_ids_keep_thoughts_that_the_template_drops() -> None:
    """R1's template drops even the last answer's thoughts; prompt and ids need no template."""
    tokenizer = FAMILIES["R1"].tokenizer()
    thinking = Conversation("think", (Turn("user", "a"), Turn("assistant", "because\n</think>\n\nOne")))
    ids = tokenizer.encode("because\n</think>\n\nOne</s>", add_special_tokens=False)
    tokenized = tokenize_conversation(tokenizer, answered(thinking, ids))
    assert tokenizer.decode(tokenized.input_ids) == "<s><|User|>a<|Assistant|><think>\nbecause\n</think>\n\nOne</s>"
    assert tokenized.answers() == [ids]


def test_ids_of_another_conversation_are_refused() -> None:
    tokenizer = FAMILIES["ChatML"].tokenizer()
    for ids, message in (([[5]], "3 assistant turns, and its answer_ids are 1, 0"), ([[5], [], [5]], "3, 1 of them")):
        with pytest.raises(UserError, match=message):
            tokenize_conversation(tokenizer, answered(TALK, *ids))
        with pytest.raises(UserError, match=message):
            tokenize_shortened(tokenizer, answered(TALK, *ids), 8)
