"""Every filter at its border."""

from typing import Any

import pytest

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.sources.mixture import Filters
from draftsmith.recipes.conversations import FiltersRecipe

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
