"""Rows by prefix: every answer carries loss once, after exactly the prompt that the target reads (invariant 6)."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support import tiny_tokenizers as templates
from support.chat_families import FAMILIES, FIELD_OF_THOUGHTS, Family, mark_loss
from support.tiny_tokenizers import CORPUS, SPECIAL, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.sources.distilled import kept_conversation, kept_record
from draftsmith.data.tokens import chat_tokens
from draftsmith.data.tokens import rows as rows_module
from draftsmith.data.tokens.chat_tokens import continued_token_ids, prompt_token_ids, token_ids
from draftsmith.data.tokens.rows import Exchange, rows_by_prefix, tokenize_batch, tokenize_rows
from draftsmith.data.tokens.templates import TemplateProblem, answer_form
from draftsmith.errors import UserError

WORDS = ["Say hi", "Hello there", "you are", "a", " ok"]
PIECES = [*WORDS, "\n", "  ", "👋", "ünï", "User: ", "Bot:", "<|im_end|>", "[INST]"]
WEIGHTS = [9, 9, 9, 9, 9, 3, 3, 3, 3, 3, 3, 0.3, 0.3]


def spaced_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Build one like SentencePiece's, whose tokens of a text depend on the text before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    alphabet = sorted({letter for text in (*PIECES, *CORPUS, "<think>/0123456789-|[]_") for letter in text})
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = template
    return fast


TOKENIZERS = {
    **{name: family.tokenizer() for name, family in FAMILIES.items()},
    **{name: tiny_tokenizer(getattr(templates, name)) for name in ("GENERATION", "HARMONY", "NO_END_TOKEN")},
    "ZEPHYR, trimmed offsets": tiny_tokenizer(templates.ZEPHYR, trim_offsets=True),
    "opened thoughts": tiny_tokenizer(templates.CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")),
    "LLAMA2, spaced": spaced_tokenizer(templates.LLAMA2),
    "NO_END_TOKEN, spaced": spaced_tokenizer(templates.NO_END_TOKEN),
}


def talk(seed: int, tokenizer: Any) -> Conversation:
    """Return up to twelve repetitive exchanges, some long or with thoughts, with the ids of some answers."""
    rng = random.Random(seed)

    def text() -> str:
        words = "".join(rng.choices(PIECES, WEIGHTS, k=rng.randint(1, 6)))
        return words if words.strip() else "a"

    def answer() -> str:
        thoughts = f"<think>\n{text()}\n</think>\n\n" if rng.random() < 0.15 else ""
        return thoughts + text() * (40 if rng.random() < 0.05 else 1)

    questions = [text() for _ in range(3)]
    turns = [Turn("system", text())] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 12)):
        turns += [Turn("user", rng.choice([text(), *questions])), Turn("assistant", answer())]
    if rng.random() < 0.6:
        return Conversation("talk", tuple(turns))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>" if "im_end" in tokenizer.chat_template else "</s>")
    said = [tokenizer.encode(turn.content, add_special_tokens=False) for turn in turns if turn.role == "assistant"]
    ids = [[*answer, end] if rng.random() < 0.8 else answer or None for answer in said]
    return Conversation("talk", tuple(turns), answer_ids=tuple(ids))


def learned(rows: list[Any]) -> list[tuple[list[int], list[int]]]:
    """Return each run of tokens with loss after all the tokens before it."""
    found = []
    for row in rows:
        loss = [0, *row.loss_mask, 0]
        begins = [place for place in range(len(row.input_ids)) if loss[place + 1] > loss[place]]
        ends = [place for place in range(len(row.input_ids) + 1) if loss[place + 1] < loss[place]]
        found += [(row.input_ids[:begin], row.input_ids[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_answer_is_learned_once_after_its_prompt_token_for_token(name: str) -> None:
    tokenizer, compared = TOKENIZERS[name], 0
    for seed in range(40):
        conversation = talk(seed, tokenizer)
        try:
            rows, lost = tokenize_rows(tokenizer, conversation, 10**6)
            form = answer_form(tokenizer)
        except TemplateProblem:
            continue
        if lost["answers_refused"]:
            continue
        answers = [place for place, turn in enumerate(conversation.turns) if turn.role == "assistant"]
        given = conversation.answer_ids or (None,) * len(answers)
        for (read, said), place, ids in zip(learned(rows), answers, given, strict=True):
            prompt = prompt_token_ids(tokenizer, conversation.turns[:place])
            opening = token_ids(tokenizer, form.opening) if ids is None and form.opening else []
            assert read == prompt or (opening and read == prompt[: len(prompt) - len(opening)])
            assert ids in (None, said)
            shown = "".join(tokenizer.decode(said, skip_special_tokens=False).split())
            content = conversation.turns[place].content.removeprefix(form.opening)
            if ids is None and "</think>" not in content and "spaced" not in name:
                assert "".join(content.split()) in shown
                assert shown.endswith(tuple({form.ending.strip(), form.in_history[1].strip()}))
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_are_tokenised_as_if_each_were_alone(name: str) -> None:
    rng, tokenizer = random.Random(1), TOKENIZERS[name]
    texts = [""]
    for _ in range(300):
        more = "".join(rng.choices(PIECES, WEIGHTS, k=rng.randint(0, 3)))
        texts.append(texts[-1] + more if rng.random() < 0.9 else more)
    assert continued_token_ids(tokenizer, texts, {}) == [token_ids(tokenizer, text) for text in texts]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_rows_of_a_limited_length_begin_as_the_whole_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of the text is read at first; what is lost is counted."""
    tokenizer, cut = TOKENIZERS[name], 0
    monkeypatch.setattr(rows_module, "CHARACTERS_PER_TOKEN", 1)
    for seed in range(20):
        conversation, length = talk(seed, tokenizer), random.Random(seed).randint(20, 120)
        try:
            rows, of_whole = tokenize_rows(tokenizer, conversation, 10**6)
        except TemplateProblem:
            continue
        whole = learned(rows)
        expected = [(read, said[: length - len(read)]) for read, said in whole if len(read) < length]
        rows, lost = tokenize_rows(tokenizer, conversation, length)
        assert learned(rows) == expected
        assert max((len(row.input_ids) for row in rows), default=0) <= length
        fitting = [pair for pair in whole if len(pair[0] + pair[1]) <= length]
        if not of_whole:
            assert lost["answers_cut"] == len(expected) - len(fitting)
            assert lost["answers_out"] == len(whole) - len(expected)
        cut += len(expected) > len(fitting)
    assert cut >= 3


def exchanges(count: int) -> Conversation:
    turns = [(Turn("user", f"question {n} Say hi"), Turn("assistant", f"answer {n} you are")) for n in range(count)]
    return Conversation("long", tuple(turn for exchange in turns for turn in exchange))


def test_turns_beyond_the_length_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    tokenize = chat_tokens.batch_token_ids
    monkeypatch.setattr(chat_tokens, "batch_token_ids", lambda *args: read.extend(args[1]) or tokenize(*args))
    for turns in (
        exchanges(200).turns,
        (*exchanges(1).turns, Turn("user", "Hello there " * 10**5), Turn("assistant", "a")),
    ):
        read.clear()
        assert tokenize_rows(TOKENIZERS["ChatML"], Conversation("x", turns), 400)[0]
        assert sum(map(len, read)) < 7000
    assert tokenize_rows(TOKENIZERS["ChatML"], Conversation("x", turns[2:]), 100) == ([], Counter(answers_out=1))
    monkeypatch.setattr(rows_module, "MOST_ANSWERS", 30)
    ((row,), lost) = tokenize_rows(TOKENIZERS["ChatML"], exchanges(50), 10**6)
    assert (len(row.answers()), lost) == (30, {"answers_out": 20})


@pytest.mark.parametrize("name", ["Qwen3", "Llama 2", "NO_END_TOKEN, spaced"])
def test_conversations_tokenised_together_have_the_rows_of_each(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    conversations = [talk(seed, tokenizer) for seed in range(12)]
    for conversation, found in zip(conversations, tokenize_batch(tokenizer, conversations, 60), strict=True):
        if isinstance(found, TemplateProblem):
            with pytest.raises(TemplateProblem):
                tokenize_rows(tokenizer, conversation, 60)
        else:
            assert found == tokenize_rows(tokenizer, conversation, 60)


def test_rows_grow_while_the_next_prompt_begins_with_them() -> None:
    grown = [Exchange([1, 2], [3, 4]), Exchange([1, 2, 3, 4, 5], [6], 0), Exchange([1, 2, 3, 4, 5, 6, 7], [8])]
    (row,), _ = rows_by_prefix(grown, 100)
    assert (row.input_ids, row.loss_mask) == ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 0, 0, 0, 1])
    rewritten = [*grown[:1], Exchange([1, 9, 5], [6]), Exchange([1, 9, 5, 6, 2], [3], 0)]
    rows, _ = rows_by_prefix(rewritten, 100)
    assert [row.input_ids for row in rows] == [[1, 2, 3, 4], [1, 9, 5, 6]]  # nothing is learned after the 6
    assert rows_by_prefix(grown, 3)[0][0].loss_mask == [0, 0, 1]
    assert rows_by_prefix(grown, 2) == ([], {"answers_out": 2})


def test_recorded_ids_make_the_rows_without_the_template() -> None:
    """Prompts are kept beside the answers, each as what it does not share with the one before, and read back."""
    prompts, answers = ([1, 2], [1, 2, 3, 4, 5], [9]), ([3, 4], [6, 7], [8])
    kept = Conversation("x", exchanges(3).turns, answer_ids=answers, prompt_ids=prompts)
    record = kept_record(kept)
    assert [prompt["ids"] for prompt in record["prompt_ids"]] == [[1, 2], [5], [9]]
    assert kept_conversation(record).prompt_ids == prompts
    rows, _ = tokenize_rows(tiny_tokenizer(None), kept_conversation(record), 100)
    assert [row.input_ids for row in rows] == [[1, 2, 3, 4, 5, 6, 7], [9, 8]]
    earlier = kept_conversation({key: value for key, value in record.items() if key != "prompt_ids"})
    assert earlier.prompt_ids == ()
    tokenizer = TOKENIZERS["ChatML"]
    assert learned(tokenize_rows(tokenizer, earlier, 1000)[0])[2] == (
        prompt_token_ids(tokenizer, kept.turns[:5]), [8]
    )  # fmt: skip


def test_ids_of_another_conversation_are_refused() -> None:
    for ids, message in (([[5]], "but the number of its answer_ids is 1, 0"), ([[5], [], [5]], "3, 1 of them")):
        with pytest.raises(UserError, match=message):
            tokenize_rows(TOKENIZERS["ChatML"], replace(exchanges(3), answer_ids=tuple(ids)), 100)


ASKED = "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", [FAMILIES["Qwen3"], FIELD_OF_THOUGHTS], ids=["content", "field"])
@pytest.mark.parametrize("in_field", [False, True])
def test_given_answers_whose_thoughts_leave_the_history_carry_loss_once(family: Family, in_field: bool) -> None:
    """In full, and not where a later prompt has them without their thoughts."""
    tokenizer = family.tokenizer()
    answers = [
        Turn("assistant", text, reasoning_content=thoughts)
        if in_field
        else Turn("assistant", f"<think>\n{thoughts}\n</think>\n\n{text}")
        for thoughts, text in (("one", "Hello"), ("two", "Bye"))
    ]
    conversation = Conversation("x", (Turn("user", "Say hi"), answers[0], Turn("user", "Say hi"), answers[1]))
    rows, _ = tokenize_rows(tokenizer, conversation, 1000)
    said = [
        f"«<think>\n{thoughts}\n</think>\n\n{text}<|im_end|>»" for thoughts, text in (("one", "Hello"), ("two", "Bye"))
    ]
    assert [mark_loss(tokenizer, row) for row in rows] == [
        ASKED + said[0], ASKED + "Hello<|im_end|>\n" + ASKED + said[1]
    ]  # fmt: skip


def test_answers_of_weight_0_carry_no_loss() -> None:
    tokenizer = tiny_tokenizer(templates.CHATML)
    asked = Turn("user", "Say hi")
    wrong, right = Turn("assistant", "Hello", weight=0), Turn("assistant", "Bye")
    rows, _ = tokenize_rows(tokenizer, Conversation("x", (asked, wrong, asked, right)), 1000)
    assert [mark_loss(tokenizer, row) for row in rows] == [ASKED + "Hello<|im_end|>\n" + ASKED + "«Bye<|im_end|>»"]
    rows, _ = tokenize_rows(tokenizer, Conversation("x", (asked, right, asked, wrong)), 1000)
    assert [mark_loss(tokenizer, row) for row in rows] == [ASKED + "«Bye<|im_end|>»"]
    assert tokenize_rows(tokenizer, Conversation("x", (asked, wrong)), 1000) == ([], Counter())


def test_thoughts_under_a_prompt_without_thoughts_are_refused() -> None:
    thinking = Conversation("x", (Turn("user", "Say hi"), Turn("assistant", "Hello", reasoning_content="one")))
    with pytest.raises(
        TemplateProblem, match=r"not write an answer after the prompt .* set target.chat_template_kwargs"
    ):
        tokenize_rows(FAMILIES["Qwen3, no thoughts"].tokenizer(), thinking, 1000)
