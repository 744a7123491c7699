"""Long conversations: tokenised in linear time, and cut exactly where a search from the last turn back cuts."""

import random
from typing import Any

import pytest
from support import tiny_tokenizers as templates
from support.chat_families import FAMILIES
from support.tiny_tokenizers import CORPUS, SPECIAL, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens import chat_tokens, spans
from draftsmith.data.tokens.chat_tokens import tokenize_conversation, tokenize_shortened, up_to_turn
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.data.tokens.templates import TemplateProblem

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
    **{name: tiny_tokenizer(getattr(templates, name)) for name in ("GENERATION", "HARMONY", "NO_END_TOKEN", "ZEPHYR")},
    "opened thoughts": tiny_tokenizer(templates.CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")),
    "LLAMA2, spaced": spaced_tokenizer(templates.LLAMA2),
    "NO_END_TOKEN, spaced": spaced_tokenizer(templates.NO_END_TOKEN),
}


def talk(seed: int, tokenizer: Any) -> Conversation:
    """Return up to twelve repetitive exchanges, some long or with thoughts, with the ids of some answers."""
    rng = random.Random(seed)

    def text() -> str:
        words = "".join(rng.choices(PIECES, WEIGHTS, k=rng.randint(1, 6)))
        return words if words.strip() else "x"

    def answer() -> str:
        thoughts = f"<think>\n{text()}\n</think>\n\n" if rng.random() < 0.15 else ""
        return thoughts + text() * (40 if rng.random() < 0.05 else 1)

    questions = [text() for _ in range(3)]
    turns = [Turn("system", text())] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 12)):
        turns += [Turn("user", rng.choice([text(), *questions])), Turn("assistant", answer())]
    turns += [Turn("user", text())] if rng.random() < 0.2 else []
    if rng.random() < 0.6:
        return Conversation("talk", tuple(turns))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>" if "im_end" in tokenizer.chat_template else "</s>")
    said = [tokenizer.encode(turn.content, add_special_tokens=False) for turn in turns if turn.role == "assistant"]
    ids = [[*answer, end] if rng.random() < 0.8 else answer or None for answer in said]
    return Conversation("talk", tuple(turns), answer_ids=tuple(ids))


def cut_by_trying_every_end(
    tokenizer: Any, conversation: Conversation, max_length_tokens: int
) -> tuple[TokenizedConversation, int] | None:
    """Cut by the definition: render for each answer, and tokenise each piece after all the text before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "AT_EACH_END", 10**6)
        patch.setattr(chat_tokens, "LOOK_BACK_CHARACTERS", 10**9)
        turns = conversation.turns
        for end in range(len(turns), 0, -1):
            if turns[end - 1].role == "assistant":
                tokenized = tokenize_conversation(tokenizer, up_to_turn(conversation, end))
                if len(tokenized.input_ids) <= max_length_tokens:
                    return tokenized, len(turns) - end
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_cut_equals_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, compared, cut = TOKENIZERS[name], 0, 0
    for seed in range(9):
        monkeypatch.setattr(chat_tokens, "ANSWERS_AT_FIRST", 2 if seed % 2 else 16)
        conversation = talk(seed, tokenizer)
        try:
            whole = cut_by_trying_every_end(tokenizer, conversation, 10**9)
            assert whole is not None
            length = random.Random(seed).randint(8, len(whole[0].input_ids) + 4)
            expected = cut_by_trying_every_end(tokenizer, conversation, length)
        except TemplateProblem:  # perhaps of a longer conversation than the one that fits
            continue
        assert tokenize_shortened(tokenizer, conversation, length) == expected
        assert tokenize_shortened(tokenizer, conversation, 10**9) == whole
        compared += 1
        cut += expected is not None and expected[1] > 0
    assert compared >= 4
    assert cut >= 2


def exchanges(count: int) -> Conversation:
    turns = [(Turn("user", f"question {n} Say hi"), Turn("assistant", f"answer {n} you are")) for n in range(count)]
    return Conversation("long", tuple(turn for exchange in turns for turn in exchange))


def count_characters(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, conversation: Conversation, length: int) -> int:
    """Return the characters rendered and tokenised to cut the conversation to a length."""
    characters = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal characters
            result = function(*args, **kwargs)
            characters += len(result) if isinstance(result, str) else len(args[1])
            return result

        return call

    with monkeypatch.context() as patch:
        for function in ("render", "token_ids"):
            patch.setattr(chat_tokens, function, counted(getattr(chat_tokens, function)))
        assert tokenize_shortened(tokenizer, conversation, length) is not None
    return characters


@pytest.mark.parametrize("name", ["ChatML", "Qwen3", "NO_END_TOKEN"])
def test_work_grows_linearly_with_the_kept_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_tokens, "LOOK_BACK_CHARACTERS", 200)
    tokenizer = TOKENIZERS[name]
    cut = [count_characters(monkeypatch, tokenizer, exchanges(count), 400) for count in (50, 100, 200)]
    assert cut[0] == cut[1] == cut[2]  # turns beyond the limit are not read
    whole = [count_characters(monkeypatch, tokenizer, exchanges(count), 10**9) for count in (50, 100)]
    assert whole[1] < 2.3 * whole[0]


def test_turn_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of many megabytes costs no memory."""
    tokenizer = TOKENIZERS["ChatML"]
    huge = Turn("user", "Hello there " * 10**6)
    first = exchanges(1).turns
    work = count_characters(monkeypatch, tokenizer, Conversation("x", (*first, huge, Turn("assistant", "a"))), 100)
    assert work < 10_000
    assert tokenize_shortened(tokenizer, Conversation("x", (huge, Turn("assistant", "a"))), 100) is None


def test_template_that_renders_turns_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thoughts before two of three answers, the answers are located one by one, up to a limit."""
    thoughts = "{% if m.role == 'assistant' and loop.index0 % 3 %}<think>{% endif %}{{ m.content }}"
    template = templates.CHATML.replace("{{ m.content }}", thoughts)
    tokenizer = tiny_tokenizer(template)
    conversation = exchanges(9)
    assert len(tokenize_conversation(tokenizer, conversation).answers()) == 9
    expected = cut_by_trying_every_end(tokenizer, conversation, 10**9)
    assert expected is not None
    assert tokenize_conversation(tokenizer, conversation) == expected[0]
    monkeypatch.setattr(spans, "MOST_RENDERED_ONE_BY_ONE", 8)
    with pytest.raises(TemplateProblem, match="does not write all 9 answers of a conversation in the same way"):
        tokenize_conversation(tokenizer, conversation)
