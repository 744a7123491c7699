"""Checks of turns, calls and tools, and the sentences for those that cannot be used."""

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

from draftsmith.data.sources.conversation import Role, Tool, Turn, tool_call
from draftsmith.data.sources.files import DECODER, TOO_DEEP, InvalidConversation

TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts of a content
THOUGHT_PARTS = ("thinking", "reasoning")
MOST_TURNS = 10_000
MOST_CHARACTERS = 8_000_000  # some two million tokens
MOST_NAMES, LONGEST_NAME = 12, 40  # in a sentence
BAD_CALL = "malformed tool call"


class EmptyTurn(InvalidConversation):
    """A turn without text, before which a conversation ends."""


class NoQuestion(InvalidConversation):
    """A record that has no question or no answer to it, so that nothing can be learned: it is counted, no error."""


def text_of(content: Any, where: str) -> str:
    """Return the text of a string, or of OpenAI's list of text parts.

    Raises:
        InvalidConversation: The content is neither.
    """
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in content):
        parts = [part.get("text", "") for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else content
    if not isinstance(content, str):
        raise InvalidConversation(where, "turn is not text", f"the turn must be text, not {json_kind(content)}")
    # Lone surrogates come from JSON escapes; they mean nothing, and neither UTF-8 nor tokenizers accept them.
    return content.encode("utf-8", errors="replace").decode("utf-8")


def text_and_thoughts(content: Any, here: str) -> tuple[str, str]:
    """Return the text of a content, and the thoughts among its parts."""
    if not isinstance(content, list):
        return text_of(content, here), ""
    is_thought = [isinstance(part, dict) and part.get("type") in THOUGHT_PARTS for part in content]
    thoughts = [part for part, thought in zip(content, is_thought, strict=True) if thought]
    texts = [next((part[key] for key in (part["type"], "text") if part.get(key) is not None), "") for part in thoughts]
    rest = [part for part, thought in zip(content, is_thought, strict=True) if not thought]
    return text_of(rest, here), "".join(text_of(each, here) for each in texts)


def listed(names: Iterable[Any]) -> str:
    """Quote the first names for a sentence; `none` if there are none."""
    first = [f"`{str(name)[:LONGEST_NAME]}`" for name in islice(names, MOST_NAMES + 1)]
    return ", ".join([*first[:MOST_NAMES], *(["..."] if len(first) > MOST_NAMES else [])]) or "none"


def json_kind(value: Any) -> str:
    """Name the type of a value as JSON does."""
    if value is None:
        return "null"
    names: dict[type, str] = {list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def is_nothing(value: Any) -> bool:
    """Return whether a key with this value says no more than a missing key."""
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, list | dict) and not value)
    )


def read_json_text(text: str, what: str, where: str, reason: str = BAD_CALL) -> Any:
    """Parse JSON; `what` names the text in the error."""
    try:
        return DECODER.decode(text)
    except (json.JSONDecodeError, RecursionError):
        raise InvalidConversation(where, reason, f"{what} must be JSON") from None


def checked_call(call: Any, here: str) -> dict[str, Any]:
    """Check a tool call: OpenAI's, or its inner {"name": ..., "arguments": ...}, with an object or JSON text.

    Raises:
        InvalidConversation: The call has neither form.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidConversation(here, BAD_CALL, "a tool call must be an object with the `name` of a function")
    arguments = function.get("arguments")
    arguments = (
        read_json_text(arguments, "a tool call's `arguments`", here) if isinstance(arguments, str) else arguments
    )
    if not isinstance(arguments, dict | None):
        what = f"a tool call's `arguments` must be an object, not {json_kind(arguments)}"
        raise InvalidConversation(here, BAD_CALL, what)
    call_id = call["id"] if isinstance(call.get("id"), str) else ""
    return _clean(tool_call(function["name"], arguments or {}, call_id), here)


def _clean(value: Any, where: str) -> Any:
    """Return the same JSON without lone surrogates: see `text_of`."""
    try:
        return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", errors="replace"))
    except RecursionError:
        raise InvalidConversation(where, TOO_DEEP, TOO_DEEP) from None
    except TypeError as error:  # a table's date or bytes
        raise InvalidConversation(where, "not JSON", f"a call or tool holds what JSON does not: {error}") from None


def checked_tools(tools: Any, where: str) -> tuple[Tool, ...]:
    """Return the functions of a record's `tools`, which may be JSON text; each with or without OpenAI's wrapping."""
    if isinstance(tools, str):
        tools = read_json_text(tools, "`tools`", where) if tools.strip() else None
    found = []
    for tool in [] if tools is None else tools if isinstance(tools, list) else [None]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            what = "`tools` must be a list of functions, each an object with a `name`"
            raise InvalidConversation(where, "malformed tools", what)
        found.append(_clean({"type": "function", "function": function}, where))
    return tuple(found)


def in_order_of_calls(turns: tuple[Turn, ...], where: str) -> tuple[Turn, ...]:
    """Return the turns with the results of calls in the order of the calls, where every result names its call.

    A template that writes no ids leaves only the place to tell which call a result belongs to.
    """
    ordered = list(turns)
    for index, turn in enumerate(turns):
        place_of = {call["id"]: place for place, call in reversed(list(enumerate(turn.tool_calls))) if "id" in call}
        end = index + 1
        while end < len(turns) and turns[end].role == "tool":
            end += 1
        results = turns[index + 1 : end]
        if not place_of or not all(result.tool_call_id for result in results):
            continue
        for number, result in enumerate(results, start=index + 2):
            if result.tool_call_id not in place_of:
                name = result.tool_call_id[:LONGEST_NAME]
                what = f"the result's tool_call_id {json.dumps(name)} is none of the calls before it"
                raise InvalidConversation(f"{where}, turn {number}", "result of another call", what)
        ordered[index + 1 : end] = sorted(results, key=lambda result: place_of[result.tool_call_id])
    return tuple(ordered)


def usable_turns(turns: tuple[Turn, ...], where: str) -> tuple[tuple[Turn, ...], list[str]]:
    """Return the turns of a conversation in order, and how it was repaired.

    Raises:
        NoQuestion: No question is left.
        InvalidConversation: The conversation is too long, or its calls and results are out of order.
    """
    characters = sum(
        len(turn.content) + len(turn.reasoning_content) + sum(map(len, map(str, turn.tool_calls))) for turn in turns
    )
    if len(turns) > MOST_TURNS or characters > MOST_CHARACTERS:
        raise InvalidConversation(
            where,
            "longer than any model reads",
            f"the conversation has {len(turns):,} turns and {characters:,} characters, more than any model reads "
            f"(at most {MOST_TURNS:,} turns and {MOST_CHARACTERS:,} characters)",
        )
    first = next((place for place, turn in enumerate(turns) if turn.role != "system"), len(turns))
    question = next((place for place in range(first, len(turns)) if turns[place].role != "assistant"), len(turns))
    repairs = ["leading assistant turns dropped"] * (question > first)
    usable = list(turns[: min(first, 1)])
    before: Role | None = None
    for number, turn in enumerate(turns[question:], start=question + 1):
        here = f"{where}, turn {number}"
        if turn.role == "tool" and before not in ("assistant", "tool"):
            sentence = "a tool's result must come after the assistant's call"
            raise InvalidConversation(here, "result without a call", sentence)
        if turn.role == "user" and (before == "tool" or (before == "assistant" and usable[-1].tool_calls)):
            sentence = "after a call its result must come, and after a result the assistant's turn"
            raise InvalidConversation(here, "a tool's exchange without an answer", sentence)
        if turn.role == "system":
            repairs.append("ended before a later system turn")
            break
        if turn.role == before and turn.role != "tool":
            repairs.append(f"ended before a second {turn.role} turn in a row")
            break
        usable.append(turn)
        before = turn.role
    if not any(turn.role == "user" for turn in usable):
        raise NoQuestion(where, "no question", "the conversation has no question")
    return tuple(usable), repairs
