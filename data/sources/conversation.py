"""A conversation, its turns, and the error that says why something is none."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from draftsmith.recipes.errors import UserError

Role = Literal["system", "user", "assistant"]
MOST_NAMES, LONGEST_NAME = 12, 40  # in a sentence


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True)
class Conversation:
    """Validated turns. `id` is a hash of the prompt side (system and user turns), so it outlives a regeneration.

    `source` is the name of the source in the recipe.
    """

    id: str
    turns: tuple[Turn, ...]
    source: str = field(default="", compare=False)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as OpenAI messages, which is what chat templates take."""
        return [{"role": turn.role, "content": turn.content} for turn in self.turns]

    @property
    def is_answered(self) -> bool:
        """Whether there are answers, and every user turn but a last one has its own."""
        answers = [turn.content for turn in self.turns if turn.role == "assistant"]
        return bool(answers) and all(answers)


class InvalidConversation(UserError):
    """A conversation that cannot be used. `reason` is the short name under which `skip_invalid` counts it."""

    def __init__(self, where: str, reason: str, sentence: str) -> None:
        super().__init__(
            f"{where}: {sentence}; fix it, or set data.conversations.skip_invalid=true to skip and count such cases"
        )
        self.reason = reason


def text_of(content: Any, where: str) -> str:
    """A string, or OpenAI's list of text parts.

    Raises:
        InvalidConversation: It is neither.
    """
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        parts = [part.get("text", "") for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else content
    if not isinstance(content, str):
        raise InvalidConversation(where, "turn is not text", f"the turn must be text, not {json_kind(content)}")
    # A lone surrogate comes in as a JSON escape, means nothing, and neither UTF-8 nor a tokenizer takes it.
    return content.encode("utf-8", errors="replace").decode("utf-8")


def listed(names: Iterable[Any]) -> str:
    """The first of them, for a sentence; `none` if there are none."""
    first = [f"`{str(name)[:LONGEST_NAME]}`" for name in islice(names, MOST_NAMES + 1)]
    return ", ".join([*first[:MOST_NAMES], *(["..."] if len(first) > MOST_NAMES else [])]) or "none"


def json_kind(value: Any) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    names: dict[type, str] = {list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
