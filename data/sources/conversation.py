"""A conversation of validated turns."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Tool = dict[str, Any]  # OpenAI's: {"type": "function", "function": {"name": ...}}
ID_HEX_DIGITS = 16


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    tool_calls: an assistant turn's calls in OpenAI's form, but with `arguments` as an object, as chat templates expect.
    name, tool_call_id: the function and the call that a tool's result belongs to, where they are known.
    reasoning_content: thoughts of an assistant turn that are not in its content.
    weight: 0 for an answer that carries no loss, else 1.
    """

    role: Role
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str = ""
    tool_call_id: str = ""
    reasoning_content: str = ""
    weight: int = 1

    @property
    def message(self) -> dict[str, Any]:
        """Return the turn as a message in OpenAI's form, which chat templates expect."""
        more: dict[str, Any] = {"tool_calls": list(self.tool_calls), "name": self.name}
        more |= {"tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        unlearned = {} if self.weight else {"weight": 0}
        message = {"role": self.role, "content": self.content}
        return message | {key: value for key, value in more.items() if value} | unlearned

    @property
    def is_empty(self) -> bool:
        """Return whether the turn has neither text nor tool calls, as an answer that the target has yet to give."""
        return not self.content and not self.tool_calls

    @property
    def called(self) -> list[str]:
        """Return the names of the functions that the turn calls, in order."""
        return [call["function"]["name"] for call in self.tool_calls]


@dataclass(frozen=True)
class Conversation:
    """A conversation of validated turns.

    id: hash of the tools and of all turns but the assistant's, so that new answers do not change it; where the source's
    own answers are kept, see `answered_id`.
    source: name of the source in the recipe. tools: the tools that the assistant may call.
    answer_ids: token ids of each generated answer, with its end token unless it was cut short; None where unknown.
    prompt_ids: for each answer, token ids of the prompt that the target read; None where unknown.
    shortened: why later turns of a distilled conversation are missing.
    """

    id: str
    turns: tuple[Turn, ...]
    source: str = field(default="", compare=False)
    tools: tuple[Tool, ...] = ()
    answer_ids: tuple[list[int] | None, ...] = field(default=(), compare=False)
    shortened: str | None = field(default=None, compare=False)
    prompt_ids: tuple[list[int] | None, ...] = field(default=(), compare=False)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the turns as messages in OpenAI's form."""
        return [turn.message for turn in self.turns]

    @property
    def is_answered(self) -> bool:
        """Return whether there are answers, and every user turn has one, except perhaps the last turn."""
        answers = [turn for turn in self.turns if turn.role == "assistant"]
        return bool(answers) and not any(turn.is_empty for turn in answers)


def conversation_id(turns: tuple[Turn, ...], tools: tuple[Tool, ...] = ()) -> str:
    """Return a hash of the tools and of all turns but the assistant's, so that new answers do not change it."""
    return _short_hash([[turn.role, turn.content] for turn in turns if turn.role != "assistant"] + list(tools))


def answered_id(conversation: Conversation) -> str:
    """Return the conversation's id followed by a hash of its answers; sorting by it keeps the order of plain ids."""
    return conversation.id + _short_hash([turn.message for turn in conversation.turns if turn.role == "assistant"])


def _short_hash(value: list[Any]) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()[:ID_HEX_DIGITS]


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two texts or two lists of tokens."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def tool_call(name: str, arguments: dict[str, Any], call_id: str = "") -> dict[str, Any]:
    """Build a tool call in OpenAI's form, with `arguments` as an object, as chat templates expect."""
    named = {"id": call_id} if call_id else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}
