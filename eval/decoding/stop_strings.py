"""Search for the stop strings that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # how a decoder writes a character of which bytes are missing


class GrowingText:
    """Text of one answer, decoded token by token, without characters whose bytes are incomplete; can be copied.

    Each call decodes only the newest tokens, together with those of the last complete piece of text, since the text of
    a token may depend on the token before it (a leading space).
    """

    def __init__(self, tokenizer: Any, skips_special_tokens: bool = True) -> None:
        self._tokenizer, self._skips_special_tokens = tokenizer, skips_special_tokens
        self.settled = ""  # up to the last complete piece
        self.text = ""
        self._context: list[int] = []  # the tokens of that piece
        self._pending: list[int] = []  # those after it

    def add(self, *tokens: int) -> str:
        """Append one or more tokens, and return the text so far."""
        self._pending = [*self._pending, *tokens]  # a new list, as copies share theirs
        known = self._decode(self._context)
        new = self._decode([*self._context, *self._pending])[len(known) :]
        self.text = self.settled + new.rstrip(UNFINISHED)
        if new and not new.endswith(UNFINISHED):
            self.settled, self._context, self._pending = self.text, self._pending, []
        return self.text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips_special_tokens)) if ids else ""


class StopMatcher:
    """Reader of one answer, token by token, which finds the token that completes a stop string.

    As in transformers, vLLM and OpenAI's API. The text is decoded as it grows, without special tokens: a token may hold
    a piece of a character, a piece of a stop string, or more than one. The result depends on the tokens alone, not on
    the rounds that gave them, so that every method cuts where the autoregressive loop does.

    Args:
        strings: The stop strings, each non-empty.
        tokenizer: The target's; only `decode` is used.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings, self._growing = strings, GrowingText(tokenizer)
        self.text_before: str | None = None

    def completes(self, token: int) -> bool:
        """Return whether this token completes a stop string; then `text_before` is the answer's text before it."""
        read = len(self._growing.settled)
        text = self._growing.add(token)
        found = [text.find(string, max(0, read - len(string) + 1)) for string in self._strings]
        places = [place for place in found if place >= 0]
        self.text_before = text[: min(places)] if places else None
        return bool(places)
