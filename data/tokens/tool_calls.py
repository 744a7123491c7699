"""The form of tool calls in a chat template, to read the calls in a target's answer as its own template writes them.

It is found by rendering a call, as `templates` finds answers: the text before the function's name, and between name
and arguments. For a template whose arguments are not JSON (Qwen3-Coder's) only the names are known, and an answer keeps
its text.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftsmith.data.sources.conversation import Conversation, Turn, common_length, tool_call
from draftsmith.data.sources.files import DECODER
from draftsmith.data.tokens.bounded import EndlessTemplate

# Names, values and a result that do not occur in templates.
NAME, SECOND, ARGUMENT, VALUE, RESULT = "xq7_first", "xq7_second", "xq7_argument", "Xq7ValueXq7", "Xq7ResultXq7"
# Nine letters and digits, as Mistral's templates want the ids of calls.
CALL_ID = "call{:05d}"
FUNCTION = {
    "name": NAME,
    "description": "A function.",
    "parameters": {"type": "object", "properties": {ARGUMENT: {"type": "string", "description": "A text."}}},
}
ASKED = (Turn("user", "Say hi"),)

Render = Callable[[Conversation, bool], str]  # raises what the template raises


@dataclass(frozen=True)
class CallForm:
    """A template's form of tool calls: patterns of the texts before a function's name, and between it and arguments."""

    before: re.Pattern[str]
    between: re.Pattern[str] | None

    def names(self, text: str) -> list[str]:
        """Return the names of the functions that an answer calls, in order."""
        return [found["name"] for found in self.before.finditer(text)]

    def turn(self, text: str, call_ids: list[str]) -> Turn:
        """Convert an answer to a turn: with its calls, or as text if it has none or they cannot be read.

        Args:
            text: Text of the answer, special tokens included, without its end token.
            call_ids: Ids for the first calls, from the results that follow; further calls get made-up ids.
        """
        calls: list[dict[str, Any]] = []
        end, start = 0, None
        for found in self.before.finditer(text):
            if found.start() < end:  # it is inside the arguments of the previous call
                continue
            start = found.start() if start is None else start
            between = self.between.match(text, found.end()) if self.between else None
            try:
                arguments, end = DECODER.raw_decode(text, between.end()) if between else (None, 0)
            except (json.JSONDecodeError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                return Turn("assistant", text)
            number = len(calls)
            call_id = call_ids[number] if number < len(call_ids) else CALL_ID.format(number + 1)
            calls.append(tool_call(found["name"], arguments, call_id))
        return Turn("assistant", text[:start].strip() if calls else text, tuple(calls))


def call_form(render: Render) -> CallForm | None:
    """Find how a chat template writes tool calls, by rendering some; None if it does not write calls and results."""
    tools = ({"type": "function", "function": FUNCTION},)
    calls = [tool_call(name, {ARGUMENT: VALUE}, CALL_ID.format(n)) for n, name in enumerate((NAME, SECOND), start=1)]

    def rendered(*turns: Turn, generation_prompt: bool = False) -> str:
        """Render turns after a question; empty if the template refuses them."""
        try:
            return render(Conversation("probe", (*ASKED, *turns), tools=tools), generation_prompt)
        except EndlessTemplate:
            raise
        except Exception:  # of any kind: templates are programs
            return ""

    called = Turn("assistant", "", tuple(calls[:1]))
    result = Turn("tool", RESULT, name=NAME, tool_call_id=calls[0]["id"])
    prompt, text = rendered(generation_prompt=True), rendered(called)
    whole = rendered(called, result, generation_prompt=True)
    later = rendered(called, result, Turn("assistant", "Hello"), *ASKED, generation_prompt=True) or whole
    answer = text.removeprefix(prompt)
    is_written = NAME in prompt and NAME in answer and VALUE in answer and RESULT in whole and RESULT in later
    if not is_written or answer == text:
        return None
    opening, _, rest = answer.partition(NAME)
    openings = [opening]
    both = rendered(Turn("assistant", "", tuple(calls))).removeprefix(prompt)
    if SECOND in both:  # many templates take one call a turn
        _, _, to_second = both[: both.index(SECOND)].rpartition(VALUE)
        openings.append(opening[len(opening) - common_length(opening[::-1], to_second[::-1]) :])  # their common end
    written = "|".join(dict.fromkeys(_ignoring_white_space(each) for each in openings if each.strip()))
    if not written:
        return None
    between = rest[: max(rest.find("{", 0, rest.index(ARGUMENT)), 0)]
    is_json = rest[len(between) : len(between) + 1] == "{"
    return CallForm(
        re.compile(rf"(?:{written})(?P<name>[\w.-]+)"),
        re.compile(_ignoring_white_space(between)) if is_json and between else None,
    )


def _ignoring_white_space(text: str) -> str:
    """Return a pattern for the text, whatever its white space."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", text))) + r"\s*" * text[-1:].isspace()
