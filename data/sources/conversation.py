"""A conversation, and how it is read from the formats in use: ShareGPT, OpenAI messages, and prompts in columns.

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "..."}                                              a prompt that the target is to answer
    {"instruction": "...", "input": "...", "output": "..."}        Alpaca; Dolly with `context` and `response`
    {"question": "...", "answer": "..."}                           question answering
    {"turns": ["...", "..."]}                                      Spec-Bench: user turns, one after the other

`data.conversations.columns` names other columns. A valid conversation is: at most one system turn, first; then user and
assistant by turns, beginning with the user; no turn is empty. A user turn at the end is kept: self-distillation answers
it. Between user turns that came without answers there are empty assistant turns, which the target fills.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import ColumnsRecipe

Role = Literal["system", "user", "assistant"]
FORMATS: tuple[tuple[str, str, str, dict[str, Role]], ...] = (  # the list's key, the turn's keys, the roles
    (
        "conversations",
        "from",
        "value",
        {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"},
    ),
    ("messages", "role", "content", {"system": "system", "user": "user", "assistant": "assistant"}),
)
COLUMNS = {
    "prompt": ("prompt", "instruction", "question", "turns"),
    "input": ("input", "context"),
    "answer": ("response", "output", "answer", "completion"),
    "system": ("system_prompt", "system"),
}
ID_HEX_DIGITS = 16
MOST_TURNS = 10_000
MOST_CHARACTERS = 8_000_000  # some two million tokens
MOST_NAMES, LONGEST_NAME = 12, 40  # in a sentence


@dataclass(frozen=True)
class Turn:
    """A turn is one message of a conversation."""

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


def parse_conversation(record: Any, where: str, columns: ColumnsRecipe | None = None) -> Conversation:
    """Read one record of any of the formats.

    Args:
        record: What JSON gave: a mapping with `conversations`, `messages` or a prompt column.
        where: File and line, for the error message.
        columns: The recipe's names of prompt columns. If it names one, a list of turns beside it is not looked at.

    Raises:
        InvalidConversation: The record is not a usable conversation; the sentence names `where` and the turn.
    """
    columns = columns or ColumnsRecipe()
    if not isinstance(record, dict):
        raise InvalidConversation(
            where, "not a mapping", f"a conversation must be a JSON object, not {json_kind(record)}"
        )
    turns = _listed_turns(record, where) if columns.prompt is None else None
    if turns is None:
        turns = _turns_of_columns(record, where, columns)
    if turns is None:
        raise InvalidConversation(
            where,
            "no conversation key",
            "a conversation needs the key `conversations` (ShareGPT), `messages` (OpenAI) or a prompt column "
            "(data.conversations.columns.prompt names it), "
            f"this one has {listed(record)}{_list_in(record)}",
        )
    _check_turns(turns, where)
    return Conversation(conversation_id(turns), turns)


def conversation_id(turns: tuple[Turn, ...]) -> str:
    """The hash of the turns that a regeneration does not change."""
    prompt_side = [[turn.role, turn.content] for turn in turns if turn.role != "assistant"]
    text = json.dumps(prompt_side, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX_DIGITS]


def text_of(content: Any, where: str) -> str:
    """The text of a string, or of OpenAI's list of text parts.

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
    """The first names, quoted, for a sentence; `none` if there are none."""
    first = [f"`{str(name)[:LONGEST_NAME]}`" for name in islice(names, MOST_NAMES + 1)]
    return ", ".join([*first[:MOST_NAMES], *(["..."] if len(first) > MOST_NAMES else [])]) or "none"


def json_kind(value: Any) -> str:
    """Name the type of a value as JSON does."""
    if value is None:
        return "null"
    names: dict[type, str] = {list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def _listed_turns(record: dict[str, Any], where: str) -> tuple[Turn, ...] | None:
    """The turns of ShareGPT or OpenAI messages; None if the record is neither, or has null, as a table's rows may."""
    for list_key, role_key, text_key, roles in FORMATS:
        messages = record.get(list_key)
        if messages is None:
            continue
        if not isinstance(messages, list):
            raise InvalidConversation(
                where, "not a list of turns", f"`{list_key}` must be a list of turns, not {json_kind(messages)}"
            )
        return tuple(
            _parse_turn(message, f"{where}, turn {number}", role_key, text_key, roles)
            for number, message in enumerate(messages, start=1)
        )
    return None


def _parse_turn(message: Any, where: str, role_key: str, text_key: str, roles: dict[str, Role]) -> Turn:
    if not isinstance(message, dict) or role_key not in message or text_key not in message:
        raise InvalidConversation(
            where, "malformed turn", f"a turn must be an object with `{role_key}` and `{text_key}`"
        )
    name = message[role_key]
    if not isinstance(name, str) or name not in roles:
        shown = json.dumps(name[:LONGEST_NAME]) if isinstance(name, str) else json_kind(name)
        raise InvalidConversation(where, "unknown role", f"unknown role {shown}, known ones are {', '.join(roles)}")
    content = text_of(message[text_key], where)
    if not content.strip():
        raise InvalidConversation(where, f"empty {roles[name]} turn", f"the {name} turn is empty")
    return Turn(roles[name], content)


def _list_in(record: dict[str, Any]) -> str:
    """A hint for a file that has its conversations one level down."""
    lists = [key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return f": if {listed(lists[:1])} holds the conversations, write that list alone into the file" if lists else ""


def _turns_of_columns(record: dict[str, Any], where: str, columns: ColumnsRecipe) -> tuple[Turn, ...] | None:
    """The turns of a record with a prompt column; None if it has none.

    An answer that is not there is an empty assistant turn, or none at the end.
    """
    prompt_column = _column(record, where, "prompt", columns)
    if prompt_column is None:
        return None
    prompts = _texts(record[prompt_column], where, prompt_column)
    input_column = _column(record, where, "input", columns)
    if input_column is not None and prompts:
        below = text_of(record[input_column], f"{where}, `{input_column}`")
        prompts[0] += f"\n\n{below}" if below.strip() else ""
    turns: list[Turn] = []
    system_column = _column(record, where, "system", columns)
    if system_column is not None:
        system = text_of(record[system_column], f"{where}, `{system_column}`")
        turns += [Turn("system", system)] if system.strip() else []
    for prompt, answer in zip(prompts, _answers(record, where, columns, len(prompts)), strict=True):
        if not prompt.strip():
            raise InvalidConversation(where, "empty user turn", f"`{prompt_column}` is empty")
        turns += [Turn("user", prompt), Turn("assistant", answer if answer.strip() else "")]
    while turns and turns[-1] == Turn("assistant", ""):
        turns.pop()
    return tuple(turns)


def _answers(record: dict[str, Any], where: str, columns: ColumnsRecipe, count: int) -> list[str]:
    """One answer for each prompt, empty where there is none."""
    column = _column(record, where, "answer", columns)
    if column is None:
        return [""] * count
    value = record[column]
    texts = value if isinstance(value, list) else [value]
    if len(texts) == count and all(isinstance(text, str) for text in texts):
        return _texts(value, where, column)
    if columns.answer is None:
        return [""] * count  # a choice's number, for instance: not what the recipe asked for
    sentence = f"`{column}` must hold one text for each of the {count} prompts"
    raise InvalidConversation(where, "answers do not fit the prompts", sentence)


def _texts(value: Any, where: str, column: str) -> list[str]:
    """The texts of a column that has one or a list of them."""
    values = value if isinstance(value, list) else [value]
    return [text_of(text, f"{where}, `{column}`") for text in values]


def _column(record: dict[str, Any], where: str, key: str, columns: ColumnsRecipe) -> str | None:
    """The column that the recipe names, else one of the usual names; one that is null counts as not there."""
    named = getattr(columns, key)
    if named is None:
        return next((column for column in COLUMNS[key] if record.get(column) is not None), None)
    if named not in record:
        raise InvalidConversation(
            where,
            f"no {key} column",
            f"there is no column `{named}`, which data.conversations.columns.{key} names, only {listed(record)}",
        )
    return named if record[named] is not None or key == "prompt" else None


def _check_turns(turns: tuple[Turn, ...], where: str) -> None:
    characters = sum(len(turn.content) for turn in turns)
    if len(turns) > MOST_TURNS or characters > MOST_CHARACTERS:
        raise InvalidConversation(
            where,
            "longer than any model reads",
            f"the conversation has {len(turns):,} turns and {characters:,} characters, more than any model reads "
            f"(at most {MOST_TURNS:,} turns and {MOST_CHARACTERS:,} characters)",
        )
    if not turns:
        raise InvalidConversation(where, "no turns", "the conversation is empty")
    expected: Role = "user"
    first = 2 if turns[0].role == "system" else 1
    for number, turn in enumerate(turns[first - 1 :], start=first):
        if turn.role == expected:
            expected = "assistant" if expected == "user" else "user"
        elif turn.role == "system":
            reason, sentence = "system turn not first", "a system turn may only be the first one"
            raise InvalidConversation(f"{where}, turn {number}", reason, sentence)
        elif number == first:
            sentence = "the conversation begins with the assistant, it must begin with the user"
            raise InvalidConversation(f"{where}, turn {number}", "first turn from the assistant", sentence)
        else:
            reason = f"two {turn.role} turns in a row"
            raise InvalidConversation(f"{where}, turn {number}", reason, f"{reason}, user and assistant must alternate")
    if len(turns) < first:
        raise InvalidConversation(where, "no user turn", "the conversation has no user turn")
