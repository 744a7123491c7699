"""Reading of a record as a conversation.

Records are in one of these forms:

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}         ShareGPT
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}     OpenAI
    {"prompt": "..."}                                              a prompt that the target is to answer
    {"question": "...", "answer": "..."}                           question answering
    {"turns": ["...", "..."]}                                      Spec-Bench: user turns, one after the other

A list of turns may also be `conversation` (LMSYS, WildChat), the record itself, or JSON text; its turns may have the
keys of either format (SpecForge: `conversations` with `role` and `content`). `data.conversations.columns` maps any
other table: `{prompt: [instruction, input], answer: output}` reads Alpaca's, whose two columns are joined in order. A
valid conversation is: at most one system turn, first; then user and assistant by turns, beginning with the user. A user
turn at the end is kept: self-distillation answers it. Between user turns that came without answers there are empty
assistant turns, which the target fills.

Lists of turns are repaired as FastChat, Medusa, EAGLE and vLLM's benchmark do with ShareGPT's split conversations:
assistant turns before the first question are dropped. A conversation ends before a turn that is empty or out of order.
Repairs are counted.

Tools are OpenAI's: `tools` next to the turns, `tool_calls` in an assistant's turn, and after it a turn of the role
`tool` for each result. `tools` may be JSON text; ShareGPT's `function_call` and `observation` are the same two turns.

A key that changes the meaning of a record is either used or refused. Used: `system` and `system_prompt` next to the
turns, and the keys of a turn (`turns`). Refused: images and other media, `documents`, `chat_template_kwargs`,
`history`, OpenAI's `functions` of 2023, and, where the record's own answers are used, answers that are marked as bad
(`kto_tag`). All other keys are not read, and counted by name.
"""

import json
from collections import Counter
from itertools import islice
from typing import Any

from draftsmith.data.sources.conversation import Conversation, Role, Turn, conversation_id
from draftsmith.data.sources.files import InvalidConversation
from draftsmith.data.sources.turns import (
    LONGEST_NAME,
    MEDIA,
    MOST_KEYS_COUNTED,
    REASONING_KEYS,
    ROLE_KEYS,
    TEXT_KEYS,
    checked_tools,
    is_nothing,
    json_kind,
    listed,
    read_json_text,
    read_turn,
    text_of,
)
from draftsmith.recipes.conversations import ColumnsRecipe

LISTS = ("conversations", "messages", "conversation")  # keys of a list of turns
COLUMNS = {
    "prompt": ("prompt", "question", "turns"),
    "answer": ("response", "answer", "completion"),
    "system": ("system_prompt", "system"),
}
REFUSED = {  # keys of a record, the names of the reasons, and the sentences
    **dict.fromkeys(MEDIA, ("comes with media", "`{}` holds media, and only text is supported: remove it")),
    "documents": ("comes with documents", "`{}` are not read: write their text into a turn"),
    "history": ("comes with a history", "`{}` holds earlier turns: write all turns into one list, `messages`"),
    "functions": ("tools of OpenAI's API of 2023", "`{}` is not read: write `tools`, and `tool_calls` in turns"),
    "chat_template_kwargs": (
        "sets variables of the template",
        "`{}` cannot differ by record: remove it, and set target.chat_template_kwargs",
    ),
}
MOST_TURNS = 10_000
MOST_CHARACTERS = 8_000_000  # some two million tokens


class NoQuestion(InvalidConversation):
    """A record without a question, or without answers where these are used. It is skipped and counted, and no error."""


def parse_conversation(
    record: Any,
    where: str,
    columns: ColumnsRecipe | None = None,
    keeps_answers: bool = True,
    unread: Counter[str] | None = None,
    repaired: Counter[str] | None = None,
) -> Conversation:
    """Convert a record (ShareGPT, OpenAI messages, columns with prompts, see the module) to a conversation.

    Args:
        record: Parsed JSON: a mapping with a list of turns or a prompt column, or the list of turns itself.
        where: File and line, for the error message.
        columns: Column names from the recipe. If they name the prompt column, a list of turns is not read.
        keeps_answers: Whether the record's own answers are used; if not, keys that concern only answers are ignored.
        unread: Receives the keys that were not read; those of a turn as `turns.key`.
        repaired: Receives the kinds of repairs, which left out a part of the record.

    Raises:
        InvalidConversation: The record is not a usable conversation; the sentence names `where` and the turn.
        NoQuestion: It has no question.
    """
    if isinstance(record, list) and record and all(isinstance(turn, dict) for turn in record):
        record = {"messages": record}
    if not isinstance(record, dict):
        what = f"a conversation must be a JSON object, not {json_kind(record)}"
        raise InvalidConversation(where, "not a mapping", what)
    return _Reader(record, where, columns or ColumnsRecipe(), keeps_answers).conversation(unread, repaired)


class _Reader:
    """Reader of one record, which remembers the keys that it has read."""

    def __init__(self, record: dict[str, Any], where: str, columns: ColumnsRecipe, keeps_answers: bool) -> None:
        self._record, self._where, self._columns, self._keeps_answers = record, where, columns, keeps_answers
        self._read: set[str] = set()
        self._unread_of_turns: dict[str, None] = {}
        self._repairs: list[str] = []

    def conversation(self, unread: Counter[str] | None, repaired: Counter[str] | None) -> Conversation:
        """Read the whole record: see `parse_conversation`."""
        self._check_unsupported()
        turns = self._listed_turns() if self._columns.prompt is None else None
        if turns is None:
            turns = self._turns_of_columns()
        if turns is None:
            raise self._invalid("no conversation key", self._missing_sentence())
        turns, repairs = usable_turns(in_order_of_calls(turns, self._where), self._where)
        self._read.add("tools")
        offered = checked_tools(self._record.get("tools"), self._where)
        if repaired is not None:
            repaired.update([*self._repairs, *repairs])
        if unread is not None:
            own = (key for key, value in self._record.items() if key not in self._read and not is_nothing(value))
            of_turns = (f"turns.{key}" for key in islice(self._unread_of_turns, MOST_KEYS_COUNTED))
            names = [*(str(key)[:LONGEST_NAME] for key in islice(own, MOST_KEYS_COUNTED)), *of_turns]
            unread.update(dict.fromkeys(names, 1))
        return Conversation(conversation_id(turns, offered), turns, tools=offered)

    def _invalid(self, reason: str, sentence: str) -> InvalidConversation:
        return InvalidConversation(self._where, reason, sentence)

    def _missing_sentence(self) -> str:
        """Return the sentence for a record without turns: keys it needs, keys it has, the likely way out."""
        record, hint = self._record, ""
        lists = {key: value for key, value in record.items() if isinstance(value, list) and value}
        holders = {key: value for key, value in lists.items() if isinstance(value[0], dict)}
        of_turns = [key for key, value in holders.items() if any(each in value[0] for each in ROLE_KEYS)]
        if of_turns:
            hint = f": if {listed(of_turns[:1])} holds the turns, set data.conversations.columns.messages to it"
        elif holders:
            hint = f": if {listed(list(holders)[:1])} holds the conversations, write that list alone into the file"
        elif "instruction" in record:
            names = [name for name in ("instruction", "input", "context") if name in record]
            answer = next((f", answer: {name}" for name in ("output", "response") if name in record), "")
            hint = f": set data.conversations.columns={{prompt: [{', '.join(names)}]{answer}}}"
        elif any(key in record for key in ROLE_KEYS) and any(key in record for key in TEXT_KEYS):
            hint = ': this is one turn: a line must hold a whole conversation, {"messages": [...]}'
        return (
            "a conversation needs the key `conversations` (ShareGPT), `messages` (OpenAI) or a prompt column "
            f"(data.conversations.columns.prompt names it), this one has {listed(record)}{hint}"
        )

    def _check_unsupported(self) -> None:
        """Raise InvalidConversation for the keys of `REFUSED`, and answers marked as bad."""
        for key, (reason, sentence) in REFUSED.items():
            if not is_nothing(self._record.get(key)):
                raise self._invalid(reason, sentence.format(key))
        if not self._keeps_answers:
            return
        bad = [key for key in ("kto_tag", "label") if self._record.get(key) is False]
        if bad:
            raise self._invalid("answer marked as bad", f"`{bad[0]}` is false, which marks the answer as bad")
        self._read.add("kto_tag")

    # ---- lists of turns ----

    def _listed_turns(self) -> tuple[Turn, ...] | None:
        """Return the turns of a list; None if the record has no list, or null, as a table's rows may have."""
        named = self._columns.messages
        if named is not None and named not in self._record:
            raise self._no_column("messages", named)
        keys = [named] if named is not None else [key for key in LISTS if self._record.get(key) is not None]
        if not keys:
            prompt = self._record.get("prompt")
            if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
                return None
            answer = next((key for key in COLUMNS["answer"] if isinstance(self._record.get(key), list)), None)
            turns = self._turns_in("prompt") + (() if answer is None else self._turns_in(answer))
        else:
            lists = [self._turns_in(key) for key in keys]
            if any(other != lists[0] for other in lists[1:]):
                what = f"{listed(keys)} hold different turns: name one in data.conversations.columns.messages"
                raise self._invalid("two lists of turns", what)
            turns = lists[0]
        system = self._text_in("system")
        if not system.strip():
            return turns
        if turns and turns[0].role == "system":
            if turns[0].content.strip() != system.strip():
                what = "the system turn and the system prompt next to the turns differ: remove one of them"
                raise self._invalid("two system prompts", what)
            return turns
        return (Turn("system", system), *turns)

    def _turns_in(self, key: str) -> tuple[Turn, ...]:
        """Return the turns of the list, or of its JSON text, in one column."""
        self._read.add(key)
        messages = self._record[key]
        if isinstance(messages, str) and messages.lstrip().startswith("["):
            messages = read_json_text(messages, f"`{key}`", self._where, "not a list of turns")
        if not isinstance(messages, list):
            what = f"`{key}` must be a list of turns, not {json_kind(messages)}"
            raise self._invalid("not a list of turns", what)
        turns: list[Turn] = []
        for number, message in enumerate(messages, start=1):
            turn = read_turn(message, f"{self._where}, turn {number}", self._keeps_answers, self._unread_of_turns)
            if not turn.content.strip() and not turn.tool_calls and turn.role != "tool":  # a tool may say nothing
                self._repairs.append(f"ended before an empty {turn.role} turn")
                break
            turns.append(turn)
        return tuple(turns)

    # ---- prompts in columns ----

    def _turns_of_columns(self) -> tuple[Turn, ...] | None:
        """Return the turns of a record with a prompt column; None if it has none.

        A missing answer is an empty assistant turn, or none at the end.
        """
        columns = self._prompt_columns()
        if not columns:
            return None
        prompts = self._texts_in(columns[0]) if len(columns) == 1 else [self._joined(columns)]
        answers = self._answers(len(prompts))
        system = self._text_in("system")
        turns = [Turn("system", system)] if system.strip() else []
        thoughts = ""
        if len(prompts) == 1 and answers[0].strip() and isinstance(self._record.get(REASONING_KEYS[0]), str):
            self._read.add(REASONING_KEYS[0])
            thoughts = text_of(self._record[REASONING_KEYS[0]], self._where)
        for prompt, answer in zip(prompts, answers, strict=True):
            if not prompt.strip():
                raise self._invalid("empty user turn", f"`{columns[0]}` is empty")
            answer_turn = Turn("assistant", answer if answer.strip() else "", reasoning_content=thoughts)
            turns += [Turn("user", prompt), answer_turn]
        while turns and turns[-1] == Turn("assistant", ""):
            turns.pop()
        return tuple(turns)

    def _prompt_columns(self) -> list[str]:
        """Return the columns that make the prompt; none if the record has none of the usual ones."""
        named = self._columns.prompt
        if named is None or isinstance(named, str):
            column = self._column("prompt")
            return [] if column is None else [column]
        for column in named:
            if column not in self._record:
                raise self._no_column("prompt", column)
        self._read.update(named)
        return named

    def _joined(self, columns: list[str]) -> str:
        """Join the texts of several columns, in order; a column that is null or empty has none."""
        texts = [
            text_of(self._record[column], f"{self._where}, `{column}`")
            for column in columns
            if self._record[column] is not None
        ]
        return "\n\n".join(text for text in texts if text.strip())

    def _answers(self, prompts: int) -> list[str]:
        """Return an answer for each prompt, empty where the record has none."""
        column = self._column("answer")
        if column is None:
            return [""] * prompts
        value = self._record[column]
        given = value if isinstance(value, list) else [value]
        if len(given) == prompts and all(isinstance(text, str) for text in given):
            return self._texts_in(column)
        # Only if the recipe names the column: otherwise it may hold something else, as the number of a choice.
        if self._columns.answer is not None:
            what = f"`{column}` must hold one text for each of the {prompts} prompts"
            raise self._invalid("answers do not fit the prompts", what)
        self._read.discard(column)
        return [""] * prompts

    def _texts_in(self, column: str) -> list[str]:
        """Return the texts of a column, which holds one text or a list of texts."""
        value = self._record[column]
        if column == "turns" and isinstance(value, str) and value.lstrip().startswith("["):
            value = read_json_text(value, "`turns`", self._where, "not a list of turns")
        values = value if isinstance(value, list) else [value]
        return [text_of(text, f"{self._where}, `{column}`") for text in values]

    def _text_in(self, key: str) -> str:
        """Return the text of the column for this key; empty if there is none."""
        column = self._column(key)
        return "" if column is None else text_of(self._record[column], f"{self._where}, `{column}`")

    def _column(self, key: str) -> str | None:
        """Return the column that the recipe names, else the usual one; a column that is null counts as absent.

        Raises:
            InvalidConversation: The record has no column of the recipe's name, or several usual ones that differ.
        """
        named = getattr(self._columns, key)
        if named is not None:
            if named not in self._record:
                raise self._no_column(key, named)
            self._read.add(named)
            return named if self._record[named] is not None or key == "prompt" else None
        present = [column for column in COLUMNS[key] if self._record.get(column) is not None]
        texts = [column for column in present if isinstance(self._record[column], str | list)]
        filled = [column for column in texts if not is_nothing(self._record[column])]
        different = len({json.dumps(self._record[column], default=str) for column in filled}) > 1
        if different and (key != "answer" or self._keeps_answers):
            what = f"{listed(filled)} could each be the {key}: name one in data.conversations.columns.{key}"
            raise self._invalid(f"several {key} columns", what)
        column = next(iter([*filled, *present]), None)
        self._read.update(filled if column in filled else [column] if column is not None else [])
        return column

    def _no_column(self, key: str, named: str) -> InvalidConversation:
        what = (
            f"there is no column `{named}`, which data.conversations.columns.{key} names, only {listed(self._record)}"
        )
        return self._invalid(f"no {key} column", what)


def in_order_of_calls(turns: tuple[Turn, ...], where: str) -> tuple[Turn, ...]:
    """Sort the tool results after each turn into the order of its calls, if every result has a `tool_call_id`.

    A chat template that writes no ids shows only by the order which call a result belongs to.
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
                what = f"the result's tool_call_id {json.dumps(name)} matches no call before it"
                raise InvalidConversation(f"{where}, turn {number}", "result of another call", what)
        ordered[index + 1 : end] = sorted(results, key=lambda result: place_of[result.tool_call_id])
    return tuple(ordered)


def usable_turns(turns: tuple[Turn, ...], where: str) -> tuple[tuple[Turn, ...], list[str]]:
    """Return the usable turns, up to the first one that is out of order, and descriptions of the repairs.

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
            sentence = "a tool's result must follow a call of the assistant"
            raise InvalidConversation(here, "result without a call", sentence)
        if turn.role == "user" and (before == "tool" or (before == "assistant" and usable[-1].tool_calls)):
            sentence = "a tool call must be followed by its result, and a result by an assistant turn"
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
