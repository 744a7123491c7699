"""Every filter at its border; the language filter with the real detector if it is installed, and without it."""

import sys
from typing import Any

import pytest

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.sources.mixture import Filters
from draftsmith.errors import UserError
from draftsmith.recipes.schema import FiltersRecipe

TALK = Conversation(
    "id",
    (
        Turn("system", "s" * 99),
        Turn("user", "ab"),
        Turn("assistant", ""),
        Turn("user", "abcd"),
        Turn("assistant", "abc"),
    ),
)


class LetterTokenizer:
    """Tokenizer with one token per letter."""

    def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
        return {"input_ids": [list(text) for text in texts]}


def reason(talk: Conversation = TALK, **keys: Any) -> str | None:
    return Filters(FiltersRecipe(**keys), LetterTokenizer()).find(talk)


@pytest.mark.parametrize(
    ("key", "passes", "fails", "sentence"),
    [
        ("min_turns", 2, 3, "fewer than 3 user turns"),
        ("max_turns", 2, 1, "more than 1 user turns"),
        ("min_turn_chars", 2, 3, "a turn of fewer than 3 characters"),
        ("max_turn_chars", 4, 3, "a turn of more than 3 characters"),
        ("max_tokens", 108, 107, "more than 107 tokens"),
    ],
)
def test_length_filters(key: str, passes: int, fails: int, sentence: str) -> None:
    assert reason() is None
    assert reason(**{key: passes}) is None
    assert reason(**{key: fails}) == sentence


def ask(text: str) -> Conversation:
    return Conversation("id", (Turn("user", text), Turn("assistant", "Warum nicht? Das ist doch ganz einfach.")))


@pytest.mark.slow  # loads the detector
def test_language_filter() -> None:
    pytest.importorskip("py3langid", reason="needs the extra `language`")
    assert reason(ask("What is the weather going to be like tomorrow?"), languages=["en"]) is None
    assert reason(ask("Wie wird denn morgen das Wetter sein?"), languages=["en"]) == "language de"
    assert reason(ask("Wie wird denn morgen das Wetter sein?"), languages=["en", "de"]) is None
    assert reason(ask("请把这句话翻译成英文，谢谢你的帮助"), languages=["en", "de"]) == "language zh"
    for unclear in ("2+2?", "def f(x): return x+1", "Who is Rajinikanth?", "ok", "Why do kids love it?"):
        assert reason(ask(unclear), languages=["en"]) is None
    with pytest.raises(UserError, match="unknown language code `english`: did you mean `en`"):
        reason(languages=["english"])


def test_language_filter_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(UserError, match=r"needs the package py3langid: pip install 'draftsmith\[language\]'"):
        reason(languages=["en"])
