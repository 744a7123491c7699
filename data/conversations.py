"""A conversation and how it is read from the two formats in use, ShareGPT and OpenAI messages.

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

A valid conversation is: at most one system turn, first; then user and assistant by turns, beginning with the user, with
at least one assistant turn; no turn is empty. A user turn at the end is kept: self-distillation answers it.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.recipes.errors import UserError

Role = Literal["system", "user", "assistant"]

SHAREGPT_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
OPENAI_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
ID_HEX_DIGITS = 16


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True)
class Conversation:
    """Validated turns. `id` is a hash of the prompt side (system and user turns), so it outlives a regeneration."""

    id: str
    turns: tuple[Turn, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as OpenAI messages, which is what chat templates take."""
        return [{"role": turn.role, "content": turn.content} for turn in self.turns]


class InvalidConversation(UserError):
    """A conversation that cannot be used. `reason` is the short name under which `skip_invalid` counts it."""

    def __init__(self, where: str, reason: str, sentence: str) -> None:
        super().__init__(
            f"{where}: {sentence}; fix it, or set data.conversations.skip_invalid=true to skip and count such cases"
        )
        self.reason = reason


def parse_conversation(record: Any, where: str) -> Conversation:
    """Read one record of either format.

    Args:
        record: What JSON gave: a mapping with `conversations` or `messages`.
        where: File and line, for the error message.

    Raises:
        InvalidConversation: The record is not a usable conversation; the sentence names `where` and the turn.
    """
    if not isinstance(record, dict):
        raise InvalidConversation(where, "not a mapping", f"a conversation must be a JSON object, not {_kind(record)}")
    for list_key, role_key, text_key, roles in (
        ("conversations", "from", "value", SHAREGPT_ROLES),
        ("messages", "role", "content", OPENAI_ROLES),
    ):
        if list_key in record:
            messages = record[list_key]
            if not isinstance(messages, list):
                raise InvalidConversation(
                    where, "not a list of turns", f"`{list_key}` must be a list of turns, not {_kind(messages)}"
                )
            turns = tuple(
                _parse_turn(message, f"{where}, turn {number}", role_key, text_key, roles)
                for number, message in enumerate(messages, start=1)
            )
            _check_order(turns, where)
            return Conversation(conversation_id(turns), turns)
    raise InvalidConversation(
        where,
        "no conversation key",
        "a conversation needs the key `conversations` (ShareGPT) or `messages` (OpenAI), "
        f"this one has {', '.join(f'`{key}`' for key in record) or 'none'}",
    )


def conversation_id(turns: tuple[Turn, ...]) -> str:
    """The hash of the turns that a regeneration does not change."""
    prompt_side = [[turn.role, turn.content] for turn in turns if turn.role != "assistant"]
    text = json.dumps(prompt_side, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX_DIGITS]


def counted_reasons(counts: Counter[str]) -> str:
    """`3 (2 empty turn, 1 not JSON)`, for reports."""
    details = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    return f"{counts.total()} ({details})" if counts else "0"


def _parse_turn(message: Any, where: str, role_key: str, text_key: str, roles: dict[str, Role]) -> Turn:
    if not isinstance(message, dict) or role_key not in message or text_key not in message:
        raise InvalidConversation(
            where, "malformed turn", f"a turn must be an object with `{role_key}` and `{text_key}`"
        )
    name = message[role_key]
    if not isinstance(name, str) or name not in roles:
        raise InvalidConversation(
            where, "unknown role", f"unknown role {json.dumps(name)}, known ones are {', '.join(roles)}"
        )
    content = _text_of(message[text_key], where)
    if not content.strip():
        raise InvalidConversation(where, f"empty {roles[name]} turn", f"the {name} turn is empty")
    return Turn(roles[name], content)


def _text_of(content: Any, where: str) -> str:
    """A string, or OpenAI's list of text parts."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise InvalidConversation(where, "turn is not text", f"the turn must be text, not {_kind(content)}")
    # A lone surrogate comes in as a JSON escape, means nothing, and neither UTF-8 nor a tokenizer takes it.
    return content.encode("utf-8", errors="replace").decode("utf-8")


def _check_order(turns: tuple[Turn, ...], where: str) -> None:
    if not turns:
        raise InvalidConversation(where, "no turns", "the conversation is empty")
    expected: Role = "user"
    for number, turn in enumerate(turns, start=1):
        if turn.role == "system" and number == 1:
            continue
        if turn.role == "system":
            raise InvalidConversation(
                f"{where}, turn {number}", "system turn not first", "a system turn may only be the first one"
            )
        if turn.role != expected:
            if number == 1 or (number == 2 and turns[0].role == "system"):
                raise InvalidConversation(
                    f"{where}, turn {number}",
                    "first turn from the assistant",
                    "the conversation begins with the assistant, it must begin with the user",
                )
            raise InvalidConversation(
                f"{where}, turn {number}",
                f"two {turn.role} turns in a row",
                f"two {turn.role} turns in a row, user and assistant must alternate",
            )
        expected = "assistant" if expected == "user" else "user"
    if all(turn.role != "assistant" for turn in turns):
        raise InvalidConversation(where, "no assistant turn", "the conversation has no assistant turn")


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    names: dict[type, str] = {list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
