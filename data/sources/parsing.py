"""How a conversation is read from the formats in use: ShareGPT, OpenAI messages, and prompts in columns.

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "..."}                                     and its likes: `data/sources/prompt_columns.py`

A valid conversation is: at most one system turn, first; then user and assistant by turns, beginning with the user; no
turn is empty. A user turn at the end is kept: self-distillation answers it. Between user turns that came without
answers stand empty assistant turns, which the target fills.
"""

import hashlib
import json
from typing import Any

from draftsmith.data.sources.conversation import (
    LONGEST_NAME,
    Conversation,
    InvalidConversation,
    Role,
    Turn,
    json_kind,
    listed,
    text_of,
)
from draftsmith.data.sources.prompt_columns import parse_prompt_columns
from draftsmith.recipes.schema import ColumnsRecipe

SHAREGPT_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
OPENAI_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
ID_HEX_DIGITS = 16
MOST_TURNS = 10_000
MOST_CHARACTERS = 8_000_000  # some two million tokens


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
        turns = parse_prompt_columns(record, where, columns)
    if turns is None:
        raise InvalidConversation(
            where,
            "no conversation key",
            "a conversation needs the key `conversations` (ShareGPT), `messages` (OpenAI) or a prompt column "
            "(data.conversations.columns.prompt names it), "
            f"this one has {listed(record)}{_list_in(record)}",
        )
    _check_size(turns, where)
    _check_order(turns, where)
    return Conversation(conversation_id(turns), turns)


def _listed_turns(record: dict[str, Any], where: str) -> tuple[Turn, ...] | None:
    """Of ShareGPT or OpenAI messages; None if the record is neither. A table's other rows may leave null behind."""
    for list_key, role_key, text_key, roles in (
        ("conversations", "from", "value", SHAREGPT_ROLES),
        ("messages", "role", "content", OPENAI_ROLES),
    ):
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


def conversation_id(turns: tuple[Turn, ...]) -> str:
    """The hash of the turns that a regeneration does not change."""
    prompt_side = [[turn.role, turn.content] for turn in turns if turn.role != "assistant"]
    text = json.dumps(prompt_side, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX_DIGITS]


def is_heldout(identity: str, heldout_frac: float) -> bool:
    """Whether a conversation belongs to the held-out split: by its id alone, whatever else there is."""
    digest = hashlib.sha256(f"heldout {identity}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < heldout_frac


def _parse_turn(message: Any, where: str, role_key: str, text_key: str, roles: dict[str, Role]) -> Turn:
    if not isinstance(message, dict) or role_key not in message or text_key not in message:
        raise InvalidConversation(
            where, "malformed turn", f"a turn must be an object with `{role_key}` and `{text_key}`"
        )
    name = message[role_key]
    if not isinstance(name, str) or name not in roles:
        raise InvalidConversation(
            where, "unknown role", f"unknown role {_role_shown(name)}, known ones are {', '.join(roles)}"
        )
    content = text_of(message[text_key], where)
    if not content.strip():
        raise InvalidConversation(where, f"empty {roles[name]} turn", f"the {name} turn is empty")
    return Turn(roles[name], content)


def _role_shown(name: Any) -> str:
    return json.dumps(name[:LONGEST_NAME]) if isinstance(name, str) else json_kind(name)


def _list_in(record: dict[str, Any]) -> str:
    """For a file that holds its conversations one level down."""
    lists = [key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return f": if {listed(lists[:1])} holds the conversations, write that list alone into the file" if lists else ""


def _check_size(turns: tuple[Turn, ...], where: str) -> None:
    characters = sum(len(turn.content) for turn in turns)
    if len(turns) > MOST_TURNS or characters > MOST_CHARACTERS:
        raise InvalidConversation(
            where,
            "longer than any model reads",
            f"the conversation has {len(turns):,} turns and {characters:,} characters, more than any model reads "
            f"(at most {MOST_TURNS:,} turns and {MOST_CHARACTERS:,} characters)",
        )


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
    if all(turn.role == "system" for turn in turns):
        raise InvalidConversation(where, "no user turn", "the conversation has no user turn")
