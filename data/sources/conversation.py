"""Conversations of one source: a local file, a Hub dataset, or those that ship with the package.

Records are in one of these forms:

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}         ShareGPT
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}     OpenAI
    {"prompt": "..."}                                              a prompt that the target is to answer
    {"instruction": "...", "input": "...", "output": "..."}        Alpaca; Dolly with `context` and `response`
    {"question": "...", "answer": "..."}                           question answering
    {"turns": ["...", "..."]}                                      Spec-Bench: user turns, one after the other

A list of turns may also be `conversation` (LMSYS, WildChat), the record itself, or JSON text; its turns may have the
keys of either format (SpecForge: `conversations` with `role` and `content`). `data.conversations.columns` names other
columns. A valid conversation is: at most one system turn, first; then user and assistant by turns, beginning with the
user; no turn is empty. A user turn at the end is kept: self-distillation answers it. Between user turns that came
without answers there are empty assistant turns, which the target fills.

Tools are OpenAI's: `tools` next to the turns, `tool_calls` in an assistant's turn, and after it a turn of the role
`tool` for each result. `tools` may be JSON text; ShareGPT's `function_call` and `observation` are the same two turns,
and so are `functions`, `function_call` and the role `function` of OpenAI's older API.

A key that changes what a record says is obeyed or refused. Obeyed: `system` and `system_prompt` next to the turns;
`history` (LlamaFactory); of a turn its thoughts (`REASONING_KEYS`) and whether it is learned (`LOSS_KEYS`: OpenAI's
`weight`, Axolotl's `train`). Refused: images and other media, `documents`, `chat_template_kwargs`, a refusal, and
where the record's own answers are used also Axolotl's `train_detail` and answers that are marked as bad (`kto_tag`).
All other keys are not read, and counted by name.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from draftsmith.data.sources.files import (
    DECODER,
    FILE_SUFFIXES,
    TOO_DEEP,
    InvalidConversation,
    Records,
    read_json_records,
    read_records,
    table_record,
)
from draftsmith.errors import UserError, did_you_mean, reason
from draftsmith.recipes.schema import ColumnsRecipe, SourceRecipe

Role = Literal["system", "user", "assistant", "tool"]
Tool = dict[str, Any]  # OpenAI's: {"type": "function", "function": {"name": ...}}
LISTS = ("conversations", "messages", "conversation")  # keys of a list of turns
ROLE_KEYS, TEXT_KEYS = ("role", "from"), ("content", "value")  # of a turn
ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "system": "system",
    "developer": "system",
}
CALL_AS_TEXT = "function_call"  # the role of a turn whose text is a call, as JSON
TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts of a content
THOUGHT_PARTS = ("thinking", "reasoning")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
LOSS_KEYS = ("weight", "train", "training", "trainable", "loss", "loss_weight")
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
COLUMNS = {
    "prompt": ("prompt", "instruction", "question", "turns"),
    "input": ("input", "context"),
    "answer": ("response", "output", "answer", "completion"),
    "system": ("system_prompt", "system"),
}
# What a prompt that holds its own answer has before it: "### Response:", "<|assistant|>", "[/INST]".
ANSWER_HEADER = re.compile(
    r"(?:(?:^|\n)[^\w\n]*(?:response|output|answer|assistant|completion|solution)[^\w\n]*"
    r"|\[/INST\]|<\|assistant\|>|<\|im_start\|>assistant|<\|end_header_id\|>)\s*$",
    re.IGNORECASE,
)
HEADER_CHARACTERS = 200
TURN_KEYS = {*ROLE_KEYS, *TEXT_KEYS, *REASONING_KEYS, *LOSS_KEYS, "tool_calls", "function_call", "tool_call_id"}
ID_HEX_DIGITS = 16
MOST_TURNS = 10_000
MOST_CHARACTERS = 8_000_000  # some two million tokens
MOST_NAMES, LONGEST_NAME = 12, 40  # in a sentence
MOST_KEYS_COUNTED = 64  # of one record
STDLIB = "stdlib"
STDLIB_FILE = Path(__file__).parents[1] / "embedded" / "conversations.jsonl.zst"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
BAD_CALL = "malformed tool call"

Split = Literal["train", "heldout", "all"]


@dataclass(frozen=True)
class Turn:
    """A turn is one message of a conversation.

    tool_calls: of an assistant turn, as OpenAI's, but with the arguments as an object, which chat templates take.
    name, tool_call_id: of a tool's result, where they are known.
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
        """The turn as an OpenAI message, which is what chat templates take."""
        more: dict[str, Any] = {"tool_calls": list(self.tool_calls), "name": self.name}
        more |= {"tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        unlearned = {} if self.weight else {"weight": 0}
        message = {"role": self.role, "content": self.content}
        return message | {key: value for key, value in more.items() if value} | unlearned

    @property
    def is_empty(self) -> bool:
        """Whether the target is yet to say it."""
        return not self.content and not self.tool_calls

    @property
    def called(self) -> list[str]:
        """The names of the functions that it calls."""
        return [call["function"]["name"] for call in self.tool_calls]


@dataclass(frozen=True)
class Conversation:
    """A conversation of validated turns.

    id: hash of everything except the assistant's turns, so that it does not change when these are regenerated.
    source: name of the source in the recipe. tools: the tools that the assistant may call.
    """

    id: str
    turns: tuple[Turn, ...]
    source: str = field(default="", compare=False)
    tools: tuple[Tool, ...] = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns as OpenAI messages."""
        return [turn.message for turn in self.turns]

    @property
    def is_answered(self) -> bool:
        """Whether there are answers, and every user turn but a last one has its own."""
        answers = [turn for turn in self.turns if turn.role == "assistant"]
        return bool(answers) and not any(turn.is_empty for turn in answers)

    @property
    def is_learned(self) -> bool:
        """Whether any answer carries loss."""
        return any(turn.role == "assistant" and turn.weight for turn in self.turns)


# ---- records ----


def open_records(recipe: SourceRecipe, split: Split) -> Records:
    """(where it was found, record) pairs; a line that is not JSON arrives as the error that it is.

    Args:
        recipe: Where to read.
        split: Used by `stdlib`, whose split is by module.

    Raises:
        UserError: There is no such file or dataset, or it cannot be read.
    """
    if recipe.source == STDLIB:
        records = (record for _, record in read_json_records(STDLIB_FILE))
        wanted = (record for record in records if split in ("all", record["split"]))
        return ((f"stdlib conversation {number}", record) for number, record in enumerate(wanted, start=1))
    file = Path(recipe.source).expanduser()
    if file.is_file():
        return read_records(file)
    if file.is_dir():
        raise UserError(
            f"data.conversations.source {file} is a folder: name one .json, .jsonl, .parquet or .csv file in it"
        )
    looks_like_a_file = recipe.source.startswith((".", "/", "~")) or recipe.source.endswith(FILE_SUFFIXES)
    if looks_like_a_file or not HUB_ID.fullmatch(recipe.source):
        hint = f"its folder {file.parent} does not exist either"
        if file.parent.is_dir():
            names = [entry.name for entry in file.parent.iterdir() if entry.is_file()]
            hint = did_you_mean(file.name, names, "correct data.conversations.source")
        raise UserError(f"conversations file {file} does not exist: {hint}")
    return _hub_records(recipe)


def _hub_records(recipe: SourceRecipe) -> Records:
    """Read a dataset of the Hugging Face Hub, or one JSON file of it.

    A JSON file is read by our own reader: `datasets` infers one schema for all rows, which mixed ShareGPT dumps break.
    """
    try:
        if recipe.file is not None and recipe.file.endswith(FILE_SUFFIXES):
            import huggingface_hub

            downloaded = huggingface_hub.hf_hub_download(
                recipe.source, recipe.file, repo_type="dataset", revision=recipe.revision
            )
            return read_records(Path(downloaded))
        import datasets

        config = {} if recipe.hub_config is None else {"name": recipe.hub_config}
        rows = datasets.load_dataset(
            recipe.source, data_files=recipe.file, revision=recipe.revision, split=recipe.hub_split, **config
        )
    except Exception as error:  # the Hub's libraries raise dozens of unrelated classes (HTTP, offline, parsing, split)
        part = f"split {recipe.hub_split}" + (f", file {recipe.file}" if recipe.file else "")
        raise UserError(
            f"Hub dataset {recipe.source} ({part}) cannot be loaded: {reason(error)}; check the name and the network, "
            "or set data.conversations.source to a local file (of a mixture: the `source` of that entry)"
        ) from None
    return ((f"{recipe.source} row {number}", table_record(row)) for number, row in enumerate(rows, start=1))


# ---- what a record says ----


def parse_conversation(
    record: Any,
    where: str,
    columns: ColumnsRecipe | None = None,
    keeps_answers: bool = True,
    unread: Counter[str] | None = None,
) -> Conversation:
    """Read one record of any of the formats.

    Args:
        record: What JSON gave: a mapping with a list of turns or a prompt column, or the list of turns itself.
        where: File and line, for the error message.
        columns: The recipe's names of columns. If it names that of prompts, a list of turns is not read.
        keeps_answers: The record's own answers are used. If not, keys that are about them alone are not looked at.
        unread: Receives the keys that were not read; those of a turn as `turns.key`.

    Raises:
        InvalidConversation: The record is not a usable conversation; the sentence names `where` and the turn.
    """
    if isinstance(record, list) and record and all(isinstance(turn, dict) for turn in record):
        record = {LISTS[1]: record}
    if not isinstance(record, dict):
        what = f"a conversation must be a JSON object, not {json_kind(record)}"
        raise InvalidConversation(where, "not a mapping", what)
    return _Reader(record, where, columns or ColumnsRecipe(), keeps_answers).conversation(unread)


def conversation_id(turns: tuple[Turn, ...], tools: tuple[Tool, ...] = (), with_answers: bool = False) -> str:
    """Hash the turns that a regeneration does not change, and the tools; `with_answers`: all turns."""
    prompt_side: list[Any] = [[turn.role, turn.content] for turn in turns if turn.role != "assistant"]
    answers = [turn.message for turn in turns if turn.role == "assistant"] if with_answers else []
    text = json.dumps(prompt_side + list(tools) + answers, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX_DIGITS]


def text_of(content: Any, where: str) -> str:
    """Return the text of a string, or of OpenAI's list of text parts.

    Raises:
        InvalidConversation: It is neither.
    """
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in content):
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


class _Reader:
    """Reader of one record, which remembers the keys that it has read."""

    def __init__(self, record: dict[str, Any], where: str, columns: ColumnsRecipe, keeps_answers: bool) -> None:
        self._record, self._where, self._columns, self._keeps_answers = record, where, columns, keeps_answers
        self._read: set[str] = set()
        self._unread_of_turns: dict[str, None] = {}

    def conversation(self, unread: Counter[str] | None) -> Conversation:
        """Read the whole record: see `parse_conversation`."""
        self._check_unsupported()
        turns = self._listed_turns() if self._columns.prompt is None else None
        if turns is None:
            turns = self._turns_of_columns()
        if turns is None:
            raise self._invalid("no conversation key", self._missing_sentence())
        turns = _in_order_of_calls(turns, self._where)
        _check_turns(turns, self._where)
        tools = next((key for key in ("tools", "functions") if not _is_nothing(self._record.get(key))), "tools")
        self._read.add(tools)
        offered = _tools_of(self._record.get(tools), self._where)
        if unread is not None:
            own = (key for key, value in self._record.items() if key not in self._read and not _is_nothing(value))
            names = [*(str(key)[:LONGEST_NAME] for key in islice(own, MOST_KEYS_COUNTED)), *self._unread_of_turns]
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
        elif any(key in record for key in ROLE_KEYS) and any(key in record for key in TEXT_KEYS):
            hint = ': this is one turn: a line must hold a whole conversation, {"messages": [...]}'
        return (
            "a conversation needs the key `conversations` (ShareGPT), `messages` (OpenAI) or a prompt column "
            f"(data.conversations.columns.prompt names it), this one has {listed(record)}{hint}"
        )

    def _check_unsupported(self) -> None:
        """Refuse what belongs to the conversation and cannot be shown to the target.

        Raises:
            InvalidConversation: There are media, documents or variables of the template; or the answer is marked as
                bad and would be used.
        """
        for key in MEDIA:
            if not _is_nothing(self._record.get(key)):
                raise self._invalid("comes with media", f"`{key}` belongs to the turns, and only text can be shown")
        if not _is_nothing(self._record.get("documents")):
            raise self._invalid("comes with documents", "`documents` cannot be shown: write them into a turn")
        if not _is_nothing(self._record.get("chat_template_kwargs")):
            what = "`chat_template_kwargs` cannot differ by record: remove it, and set target.chat_template_kwargs"
            raise self._invalid("sets variables of the template", what)
        if not self._keeps_answers:
            return
        bad = [key for key in ("kto_tag", "label") if self._record.get(key) is False]
        if bad:
            raise self._invalid("answer marked as bad", f"`{bad[0]}` is false: its answer is one not to learn")
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
            messages = _read_json(messages, f"`{key}`", self._where, "not a list of turns")
        if not isinstance(messages, list):
            what = f"`{key}` must be a list of turns, not {json_kind(messages)}"
            raise self._invalid("not a list of turns", what)
        return tuple(
            self._turn(message, f"{self._where}, turn {number}") for number, message in enumerate(messages, start=1)
        )

    def _turn(self, message: Any, here: str) -> Turn:
        """Read one turn of a list."""
        name, content, calls = self._parts(message, here)
        role = ROLES[name]
        if name == CALL_AS_TEXT:
            text, _ = _text_and_thoughts(content, here)
            calls, content = _read_json(text, f"the {CALL_AS_TEXT}", here), ""
            calls = calls if isinstance(calls, list) else [calls]
        if calls and role != "assistant":
            raise InvalidConversation(here, BAD_CALL, f"a {role} turn calls tools, which only the assistant does")
        if calls is not None and not isinstance(calls, list):
            raise InvalidConversation(here, BAD_CALL, f"`tool_calls` must be a list, not {json_kind(calls)}")
        said = "" if content is None and (calls or role == "tool") else content
        text, thoughts = _text_and_thoughts(said, here)
        reasoning = [
            text_of(message[key], f"{here}, `{key}`") for key in REASONING_KEYS if message.get(key) is not None
        ]
        reasoning = list(dict.fromkeys(each for each in (*reasoning, thoughts) if each.strip()))
        if len(reasoning) > 1 or (reasoning and role != "assistant"):
            what = "two fields hold different thoughts" if role == "assistant" else f"a {role} turn has thoughts"
            raise InvalidConversation(here, "malformed thoughts", what)
        if not text.strip() and not calls and role != "tool":  # a tool may well have nothing to say
            raise InvalidConversation(here, f"empty {role} turn", f"the {name} turn is empty")
        keys = ("name", "tool_call_id") if role == "tool" else ()
        of_tool = {key: value for key in keys if isinstance(value := message.get(key), str)}
        known = {*TURN_KEYS, *keys}
        for key in islice(message, MOST_KEYS_COUNTED):
            is_counted = len(self._unread_of_turns) < MOST_KEYS_COUNTED
            if is_counted and key not in known and not _is_nothing(message[key]):
                self._unread_of_turns[f"turns.{str(key)[:LONGEST_NAME]}"] = None
        return Turn(
            role,
            text,
            tuple(_call(call, here) for call in calls or ()),
            **of_tool,
            reasoning_content="".join(reasoning),
            weight=self._weight(message, role, here),
        )

    def _parts(self, message: Any, here: str) -> tuple[str, Any, Any]:
        """Return the name of a turn's role, its content and its calls, whichever keys they have."""
        if not isinstance(message, dict):
            message = {}
        calls = message.get("tool_calls")
        if not calls and message.get("function_call") is not None:
            calls = [message["function_call"]]
        roles = [key for key in ROLE_KEYS if message.get(key) is not None]
        texts = [key for key in TEXT_KEYS if message.get(key) is not None] or [
            key for key in TEXT_KEYS if key in message
        ]
        if not roles or (not texts and not calls):
            pairs = " or ".join(f"`{role}` and `{text}`" for role, text in zip(ROLE_KEYS, TEXT_KEYS, strict=True))
            what = f"a turn must be an object with {pairs}; this one has {listed(message)}"
            raise InvalidConversation(here, "malformed turn", what)
        for key in (*MEDIA, "refusal"):
            if not _is_nothing(message.get(key)):
                what = f"the turn has `{key}`, and only the text of `content` can be read"
                raise InvalidConversation(here, "turn is not text", what)
        name = message[roles[0]]
        if not isinstance(name, str) or name not in ROLES:
            shown = json.dumps(name[:LONGEST_NAME]) if isinstance(name, str) else json_kind(name)
            raise InvalidConversation(here, "unknown role", f"unknown role {shown}, known ones are {', '.join(ROLES)}")
        contents = [message[key] for key in texts]
        others = [message[key] for key in roles[1:]]
        same_role = all(isinstance(other, str) and ROLES.get(other) == ROLES[name] for other in others)
        if not same_role or any(other != contents[0] for other in contents):
            what = f"{listed([*roles, *texts])} of a turn contradict each other: remove the wrong ones"
            raise InvalidConversation(here, "malformed turn", what)
        return name, contents[0] if contents else None, calls

    def _weight(self, message: dict[str, Any], role: Role, here: str) -> int:
        """Return the weight of a turn by any of `LOSS_KEYS`: 0, or 1, which is the default."""
        if not self._keeps_answers:
            return 1
        if not _is_nothing(message.get("train_detail")):
            what = "`train_detail` says which parts of a turn are learned, and turns are learned whole or not at all"
            raise InvalidConversation(here, "parts of a turn are learned", what)
        said = {key: message[key] for key in LOSS_KEYS if message.get(key) is not None}
        for key, value in said.items():
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                shown = json.dumps(value, default=str)[:LONGEST_NAME]
                what = f"`{key}` of a turn must be 0 or 1, true or false, not {shown}"
                raise InvalidConversation(here, "weight other than 0 or 1", what)
            if value and role != "assistant":
                what = f"`{key}` asks to learn a {role} turn, and a drafter learns the assistant's alone: remove it"
                raise InvalidConversation(here, f"learns a {role} turn", what)
        if len({int(value) for value in said.values()}) > 1:
            what = f"{listed(said)} of a turn contradict each other: remove the wrong ones"
            raise InvalidConversation(here, "malformed turn", what)
        return min((int(value) for value in said.values()), default=1) if role == "assistant" else 1

    # ---- prompts in columns ----

    def _turns_of_columns(self) -> tuple[Turn, ...] | None:
        """Return the turns of a record with a prompt column; None if it has none.

        A missing answer is an empty assistant turn, or none at the end.
        """
        prompt_column = self._column("prompt")
        if prompt_column is None:
            return None
        prompts = self._texts_in(prompt_column)
        answers = self._answers(len(prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            self._check_prompt_is_no_answer(prompt_column, prompt.rstrip(), answer.strip())
        if prompts and (below := self._text_in("input")).strip():
            prompts[0] += f"\n\n{below}"
        system = self._text_in("system")
        turns = [Turn("system", system)] if system.strip() else []
        turns += self._history()
        thoughts = ""
        if len(prompts) == 1 and answers[0].strip() and isinstance(self._record.get(REASONING_KEYS[0]), str):
            self._read.add(REASONING_KEYS[0])
            thoughts = text_of(self._record[REASONING_KEYS[0]], self._where)
        for prompt, answer in zip(prompts, answers, strict=True):
            if not prompt.strip():
                raise self._invalid("empty user turn", f"`{prompt_column}` is empty")
            said = Turn("assistant", answer if answer.strip() else "", reasoning_content=thoughts)
            turns += [Turn("user", prompt), said]
        while turns and turns[-1] == Turn("assistant", ""):
            turns.pop()
        return tuple(turns)

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

    def _check_prompt_is_no_answer(self, column: str, prompt: str, answer: str) -> None:
        """Refuse a prompt that is a whole example: it ends with its answer, under a header of answers."""
        before = prompt[: len(prompt) - len(answer)][-HEADER_CHARACTERS:]
        if answer and prompt.endswith(answer) and ANSWER_HEADER.search(before):
            others = [each for each in COLUMNS["prompt"] if each != column and each in self._record]
            way_out = f": set data.conversations.columns.prompt={others[0]}" if others else ""
            raise self._invalid("the prompt holds the answer", f"`{column}` ends with the record's answer{way_out}")

    def _history(self) -> list[Turn]:
        """Return earlier exchanges, in LlamaFactory's Alpaca format pairs of a question and its answer."""
        history = self._record.get("history")
        if _is_nothing(history):
            return []
        self._read.add("history")
        pairs = (
            _read_json(history, "`history`", self._where, "malformed history") if isinstance(history, str) else history
        )
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) and text.strip() for text in pair)
            for pair in pairs
        ):
            raise self._invalid("malformed history", "`history` must be a list of pairs of a question and its answer")
        texts = [text_of(text, self._where) for pair in pairs for text in pair]
        return [Turn("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]

    def _texts_in(self, column: str) -> list[str]:
        value = self._record[column]
        if column == "turns" and isinstance(value, str) and value.lstrip().startswith("["):
            value = _read_json(value, "`turns`", self._where, "not a list of turns")
        values = value if isinstance(value, list) else [value]
        return [text_of(text, f"{self._where}, `{column}`") for text in values]

    def _text_in(self, key: str) -> str:
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
        filled = [column for column in texts if not _is_nothing(self._record[column])]
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


def _is_nothing(value: Any) -> bool:
    """Return whether a key with this value says no more than a missing key."""
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, list | dict) and not value)
    )


def _text_and_thoughts(content: Any, here: str) -> tuple[str, str]:
    """Return the text of a content, and the thoughts among its parts."""
    if not isinstance(content, list):
        return text_of(content, here), ""
    is_thought = [isinstance(part, dict) and part.get("type") in THOUGHT_PARTS for part in content]
    thoughts = [part for part, thought in zip(content, is_thought, strict=True) if thought]
    told = [next((part[key] for key in (part["type"], "text") if part.get(key) is not None), "") for part in thoughts]
    rest = [part for part, thought in zip(content, is_thought, strict=True) if not thought]
    return text_of(rest, here), "".join(text_of(each, here) for each in told)


def _in_order_of_calls(turns: tuple[Turn, ...], where: str) -> tuple[Turn, ...]:
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


def _call(call: Any, here: str) -> dict[str, Any]:
    """Check a tool call: OpenAI's, or its inner {"name": ..., "arguments": ...}, with an object or JSON text.

    Raises:
        InvalidConversation: It is no such call.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidConversation(here, BAD_CALL, "a tool call must be an object with the `name` of a function")
    arguments = function.get("arguments")
    arguments = _read_json(arguments, "a tool call's `arguments`", here) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict | None):
        what = f"a tool call's `arguments` must be an object, not {json_kind(arguments)}"
        raise InvalidConversation(here, BAD_CALL, what)
    call_id = call["id"] if isinstance(call.get("id"), str) else ""
    return _clean(tool_call(function["name"], arguments or {}, call_id), here)


def tool_call(name: str, arguments: dict[str, Any], call_id: str = "") -> dict[str, Any]:
    """A call as chat templates take it."""
    named = {"id": call_id} if call_id else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def _clean(value: Any, where: str) -> Any:
    """The same JSON without lone surrogates: see `text_of`."""
    try:
        return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", errors="replace"))
    except RecursionError:
        raise InvalidConversation(where, TOO_DEEP, TOO_DEEP) from None
    except TypeError as error:  # a table's date or bytes
        raise InvalidConversation(where, "not JSON", f"a call or tool holds what JSON does not: {error}") from None


def _tools_of(tools: Any, where: str) -> tuple[Tool, ...]:
    """The functions of a record's `tools`, which may be JSON text; each with or without OpenAI's wrapping."""
    if isinstance(tools, str):
        tools = _read_json(tools, "`tools`", where) if tools.strip() else None
    found = []
    for tool in [] if tools is None else tools if isinstance(tools, list) else [None]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            what = "`tools` must be a list of functions, each an object with a `name`"
            raise InvalidConversation(where, "malformed tools", what)
        found.append(_clean({"type": "function", "function": function}, where))
    return tuple(found)


def _read_json(text: str, what: str, where: str, reason: str = BAD_CALL) -> Any:
    try:
        return DECODER.decode(text)
    except (json.JSONDecodeError, RecursionError):
        raise InvalidConversation(where, reason, f"{what} must be JSON") from None


def _check_turns(turns: tuple[Turn, ...], where: str) -> None:
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
    if not turns:
        raise InvalidConversation(where, "no turns", "the conversation is empty")
    first = 2 if turns[0].role == "system" else 1
    before: Role | None = None
    for number, turn in enumerate(turns[first - 1 :], start=first):
        here, reason = f"{where}, turn {number}", ""
        if turn.role == "system":
            reason, sentence = "system turn not first", "a system turn may only be the first one"
        elif turn.role == "assistant" and before is None:
            reason = "first turn from the assistant"
            sentence = "the conversation begins with the assistant, it must begin with the user"
        elif turn.role == "tool" and before not in ("assistant", "tool"):
            reason, sentence = "result without a call", "a tool's result must come after the assistant's call"
        elif turn.role == "user" and (before == "tool" or (before == "assistant" and turns[number - 2].tool_calls)):
            reason = "a tool's exchange without an answer"
            sentence = "after a call its result must come, and after a result the assistant's turn"
        elif turn.role == before and turn.role != "tool":
            reason = f"two {turn.role} turns in a row"
            sentence = f"{reason}, user and assistant must alternate"
        if reason:
            raise InvalidConversation(here, reason, sentence)
        before = turn.role
    if len(turns) < first:
        raise InvalidConversation(where, "no user turn", "the conversation has no user turn")
