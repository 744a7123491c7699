"""Reading of one turn: the one way from a message, of a record or of a request to `serve`, to a `Turn`.

A turn has OpenAI's keys or ShareGPT's. Its content is text, or a list of parts, whose texts are joined by newlines, as
vLLM and llama.cpp do. A key that changes the meaning of a turn is used or refused. Used: its name, its calls, its
thoughts (`REASONING_KEYS`) and whether it is learned (`LOSS_KEYS`: OpenAI's `weight`, Axolotl's `train`). Refused:
media, a refusal, and OpenAI's `function_call` of 2023. All other keys are not read, and reported by name.
"""

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

from draftsmith.data.sources.conversation import Role, Tool, Turn, tool_call
from draftsmith.data.sources.files import DECODER, TOO_DEEP, InvalidConversation

ROLE_KEYS, TEXT_KEYS = ("role", "from"), ("content", "value")
ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "system": "system",
    "developer": "system",
}
CALL_AS_TEXT = "function_call"  # the role of a turn whose text is a call, as JSON
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
LOSS_KEYS = ("weight", "train", "training", "trainable", "loss", "loss_weight")
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
TURN_KEYS = {*ROLE_KEYS, *TEXT_KEYS, *REASONING_KEYS, *LOSS_KEYS, "tool_calls", "tool_call_id", "name"}
TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts of a content
MOST_NAMES, LONGEST_NAME = 12, 40  # in a sentence
MOST_KEYS_COUNTED = 64  # of one record
BAD_CALL = "malformed tool call"


def read_turn(message: Any, here: str, keeps_answers: bool = True, unread: dict[str, None] | None = None) -> Turn:
    """Convert a message, in OpenAI's or ShareGPT's form, to a turn, whose text may be empty.

    Args:
        message: Parsed JSON.
        here: Place of the turn, for the error message.
        keeps_answers: Whether the record's own answers are used; if not, keys that concern only answers are ignored.
        unread: Receives the keys that were not read.

    Raises:
        InvalidConversation: The message is not a turn of text and calls.
    """
    if not isinstance(message, dict):
        message = {}
    calls = message.get("tool_calls")
    roles = [key for key in ROLE_KEYS if message.get(key) is not None]
    texts = [key for key in TEXT_KEYS if message.get(key) is not None] or [key for key in TEXT_KEYS if key in message]
    thoughts = [text_of(message[key], f"{here}, `{key}`") for key in REASONING_KEYS if message.get(key) is not None]
    if not roles or not (texts or calls or thoughts):
        pairs = " or ".join(f"`{role}` and `{text}`" for role, text in zip(ROLE_KEYS, TEXT_KEYS, strict=True))
        what = f"a turn must be an object with {pairs}; this one has {listed(message)}"
        raise InvalidConversation(here, "malformed turn", what)
    for key in (*MEDIA, "refusal", "function_call"):
        if not is_nothing(message.get(key)):
            what = f"the turn has `{key}`, but only the text of `content` and `tool_calls` are supported"
            raise InvalidConversation(here, "turn is not text", what)
    name = message[roles[0]]
    if not isinstance(name, str) or name not in ROLES:
        shown = json.dumps(name[:LONGEST_NAME]) if isinstance(name, str) else json_kind(name)
        raise InvalidConversation(here, "unknown role", f"unknown role {shown}, known ones are {', '.join(ROLES)}")
    role, content = ROLES[name], message[texts[0]] if texts else None
    same_role = all(isinstance(message[key], str) and ROLES.get(message[key]) == role for key in roles)
    if not same_role or any(message[key] != content for key in texts):
        what = f"{listed([*roles, *texts])} of a turn contradict each other: remove the wrong ones"
        raise InvalidConversation(here, "malformed turn", what)
    if name == CALL_AS_TEXT:
        calls, content = read_json_text(text_of(content, here), f"the {CALL_AS_TEXT}", here), ""
        calls = calls if isinstance(calls, list) else [calls]
    if calls and role != "assistant":
        raise InvalidConversation(here, BAD_CALL, f"a {role} turn calls tools, which only the assistant does")
    if not isinstance(calls, list | None):
        raise InvalidConversation(here, BAD_CALL, f"`tool_calls` must be a list, not {json_kind(calls)}")
    may_lack_text = calls or thoughts or role == "tool"
    text = text_of("" if content is None and may_lack_text else content, here)
    thoughts = list(dict.fromkeys(each for each in thoughts if each.strip()))
    if len(thoughts) > 1 or (thoughts and role != "assistant"):
        what = "two fields hold different thoughts" if role == "assistant" else f"a {role} turn has thoughts"
        raise InvalidConversation(here, "malformed thoughts", what)
    keys = ("name", "tool_call_id") if role == "tool" else ("name",)
    if unread is not None:
        known = TURN_KEYS if role == "tool" else TURN_KEYS - {"tool_call_id"}
        others = (
            key for key in islice(message, MOST_KEYS_COUNTED) if key not in known and not is_nothing(message[key])
        )
        unread.update(dict.fromkeys(str(key)[:LONGEST_NAME] for key in others))
    return Turn(
        role,
        text,
        tuple(checked_call(call, here) for call in calls or ()),
        **{key: text_of(value, here) for key in keys if isinstance(value := message.get(key), str)},
        reasoning_content="".join(thoughts),
        weight=_weight(message, role, here) if keeps_answers else 1,
    )


def _weight(message: dict[str, Any], role: Role, here: str) -> int:
    """Return the weight of a turn by any of `LOSS_KEYS`: 0, or 1, which is the default."""
    if not is_nothing(message.get("train_detail")):
        what = "`train_detail` selects parts of a turn for training, but a turn is trained on whole or not at all"
        raise InvalidConversation(here, "parts of a turn are learned", what)
    given = {key: message[key] for key in LOSS_KEYS if message.get(key) is not None}
    allowed = (0, 1) if role == "assistant" else (0,)
    is_number = all(isinstance(value, bool | int | float) for value in given.values())
    if not is_number or not all(value in allowed for value in given.values()) or len(set(given.values())) > 1:
        what = f"{listed(given)} of the {role}'s turn must be {' or '.join(map(str, allowed))}, with the same value"
        raise InvalidConversation(here, "malformed weight", what)
    return int(next(iter(given.values()), 1)) if role == "assistant" else 1


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content, which is a string or OpenAI's list of text parts.

    Raises:
        InvalidConversation: The content is neither.
    """
    if isinstance(content, list):
        content = "\n".join(_text_of_part(part, where) for part in content)
    if not isinstance(content, str):
        raise InvalidConversation(where, "turn is not text", f"the turn must be text, not {json_kind(content)}")
    # Lone surrogates come from JSON escapes; they mean nothing, and neither UTF-8 nor tokenizers accept them.
    return content.encode("utf-8", errors="replace").decode("utf-8")


def _text_of_part(part: Any, where: str) -> str:
    kind, text = (part.get("type"), part.get("text", "")) if isinstance(part, dict) else (json_kind(part), None)
    if kind not in TEXT_PARTS or not isinstance(text, str):
        shown = kind[:LONGEST_NAME] if isinstance(kind, str) else json_kind(kind)
        raise InvalidConversation(
            where, "turn is not text", f"a part of the turn must be text, not {json.dumps(shown)}"
        )
    return text


def listed(names: Iterable[Any]) -> str:
    """Format the first 12 names for a message, each in backticks and separated by commas; `none` if there are none."""
    first = [f"`{str(name)[:LONGEST_NAME]}`" for name in islice(names, MOST_NAMES + 1)]
    return ", ".join([*first[:MOST_NAMES], *(["..."] if len(first) > MOST_NAMES else [])]) or "none"


def json_kind(value: Any) -> str:
    """Return the JSON type of a value for a message, such as `a list` or `null`."""
    if value is None:
        return "null"
    names: dict[type, str] = {list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def is_nothing(value: Any) -> bool:
    """Return whether a value is null, blank text or an empty list or object, so that its key counts as missing."""
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, list | dict) and not value)
    )


def read_json_text(text: str, what: str, where: str, reason: str = BAD_CALL) -> Any:
    """Parse JSON text. For the error: `what` names the text, `where` its place, `reason` the kind to count it by."""
    try:
        return DECODER.decode(text)
    except (json.JSONDecodeError, RecursionError):
        raise InvalidConversation(where, reason, f"{what} must be JSON") from None


def checked_call(call: Any, here: str) -> dict[str, Any]:
    """Check a tool call, OpenAI's or {"name": ..., "arguments": ...} alone, and return it with arguments as an object.

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
        raise InvalidConversation(where, "not JSON", f"a tool or call has a value unknown to JSON: {error}") from None


def checked_tools(tools: Any, where: str) -> tuple[Tool, ...]:
    """Check the `tools` of a record, a list of functions or its JSON text, and return them in OpenAI's form."""
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
