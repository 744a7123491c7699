"""Strings that end an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNFINISHED = "\ufffd"  # how a decoder writes a character of which bytes are missing


@dataclass(frozen=True)
class StopStrings:
    """Strings that end an answer at the token with which one of them becomes complete, its text just before it.

    As in transformers, vLLM and OpenAI's API. The text is decoded as it grows, without special tokens: a token may hold
    a piece of a character, a piece of a stop string, or more than one. What is found depends on the tokens alone, one
    after the other, so that every method cuts where the autoregressive loop does.

    Args:
        strings: Each non-empty.
        tokenizer: The target's; only `decode` is used.
    """

    strings: tuple[str, ...]
    tokenizer: Any


class StopMatcher:
    """Reads one answer token by token.

    Only the latest tokens are decoded again: from those of the last complete piece of text, whose own text is known,
    since what a tokenizer makes of a token may depend on the one before it (a leading space).
    """

    def __init__(self, stop: StopStrings) -> None:
        self._stop = stop
        self._text = ""  # complete characters
        self._context: list[int] = []  # the tokens of the last complete piece
        self._pending: list[int] = []  # those after it
        self.text_before: str | None = None

    def completes(self, token: int) -> bool:
        """Whether a stop string is complete with this token; then `text_before` is the answer's text before it."""
        self._pending.append(token)
        known = self._decode(self._context)
        new = self._decode([*self._context, *self._pending])[len(known) :]
        settled = not new.endswith(UNFINISHED)
        text = self._text + new.rstrip(UNFINISHED)
        found = [text.find(string, max(0, len(self._text) - len(string) + 1)) for string in self._stop.strings]
        places = [place for place in found if place >= 0]
        if places:
            self.text_before = text[: min(places)]
            return True
        if new and settled:
            self._text, self._context, self._pending = text, self._pending, []
        return False

    def _decode(self, ids: list[int]) -> str:
        return self._stop.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
