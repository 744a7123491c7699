"""Conversations of one source: a local JSON file, a Hub dataset, or those that ship with the package.

Records are in one of these forms:

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}         ShareGPT
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}     OpenAI
    {"prompt": "..."}                                              a prompt that the target is to answer
    {"instruction": "...", "input": "...", "output": "..."}        Alpaca; Dolly with `context` and `response`
    {"question": "...", "answer": "..."}                           question answering
    {"turns": ["...", "..."]}                                      Spec-Bench: user turns, one after the other

`data.conversations.columns` names other columns. A valid conversation is: at most one system turn, first; then user and
assistant by turns, beginning with the user; no turn is empty. A user turn at the end is kept: self-distillation answers
it. Between user turns that came without answers there are empty assistant turns, which the target fills.

Tools are OpenAI's: `tools` beside the turns, `tool_calls` in an assistant's turn, and after it a turn of the role
`tool` for each result. `tools` may be JSON text; ShareGPT's `function_call` and `observation` are the same two turns.

A file has one record a line, an array of them, or one after the other over several lines; plain or compressed (.gz,
.xz, .zst). `{"data": [...]}` is read as the array that it holds. Lines are read as a stream, one record at a time; of
records over several lines the text is in memory as a whole.
"""

import codecs
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from draftsmith.recipes.errors import UserError, did_you_mean, reason
from draftsmith.recipes.schema import ColumnsRecipe, SourceRecipe

Role = Literal["system", "user", "assistant", "tool"]
Tool = dict[str, Any]  # OpenAI's: {"type": "function", "function": {"name": ...}}
FORMATS: tuple[tuple[str, str, str, dict[str, Role]], ...] = (  # the list's key, the turn's keys, the roles
    (
        "conversations",
        "from",
        "value",
        {
            "human": "user",
            "user": "user",
            "gpt": "assistant",
            "assistant": "assistant",
            "function_call": "assistant",
            "observation": "tool",
            "tool": "tool",
            "system": "system",
        },
    ),
    ("messages", "role", "content", {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}),
)
CALL_AS_TEXT = "function_call"  # the role of a turn whose text is a call, as JSON
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
STDLIB = "stdlib"
STDLIB_FILE = Path(__file__).parents[1] / "embedded" / "conversations.jsonl.zst"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
FILE_SUFFIXES = (*JSON_SUFFIXES, ".gz", ".xz", ".zst")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HEAD_BYTES = 1 << 20
MOST_RECORD_BYTES = 16 << 20  # a million tokens, each letter an escape
MOST_DIGITS = 400  # of an integer, which is a number of no use beyond that
BLANK = re.compile(r"[ \t\r\n]*")
CONTAINER = re.compile(r'\{\s*"data"\s*:\s*\[(?=\s*\{)')
BAD_CALL = "malformed tool call"
TOO_DEEP, TOO_LARGE = "nested too deeply", "larger than 16 MiB"
DECODER = json.JSONDecoder(parse_int=lambda digits: (int if len(digits) < MOST_DIGITS else float)(digits))
CONVERT = "convert it to UTF-8, or give a .gz, .xz or .zst its suffix"

Split = Literal["train", "heldout", "all"]
Records = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Turn:
    """A turn is one message of a conversation.

    tool_calls: of an assistant turn, as OpenAI's, but with the arguments as an object, which chat templates take.
    name, tool_call_id: of a tool's result, where they are known.
    """

    role: Role
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str = ""
    tool_call_id: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The turn as an OpenAI message, which is what chat templates take."""
        more = {"tool_calls": list(self.tool_calls), "name": self.name, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": self.content} | {key: value for key, value in more.items() if value}

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
    """Validated turns. `id` is a hash of all that the assistant did not say, so it outlives a regeneration.

    `source` is the name of the source in the recipe; `tools` are those that the assistant may call.
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


class InvalidConversation(UserError):
    """A record that cannot be used. `reason` is the short name under which `skip_invalid` counts it."""

    def __init__(self, where: str, reason: str, sentence: str) -> None:
        super().__init__(
            f"{where}: {sentence}; fix it, or set data.conversations.skip_invalid=true to skip and count such cases"
        )
        self.reason, self.sentence = reason, sentence


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
        return read_json_records(file)
    if file.is_dir():
        raise UserError(f"data.conversations.source {file} is a folder: name one .json or .jsonl file in it")
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
            return read_json_records(Path(downloaded))
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
    return ((f"{recipe.source} row {number}", row) for number, row in enumerate(rows, start=1))


def json_of(line: bytes, where: str) -> Any:
    """Parse a line of JSON.

    Raises:
        InvalidConversation: It is not UTF-8, no JSON, or more than any record is.
    """
    try:
        if len(line) > MOST_RECORD_BYTES:
            raise InvalidConversation(where, TOO_LARGE, f"{TOO_LARGE}, which no conversation is")
        return DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte 0x{line[error.start]:02x} at position {error.start + 1}): {CONVERT}"
        raise InvalidConversation(where, "not UTF-8", what) from None
    except json.JSONDecodeError as error:
        raise InvalidConversation(where, "not JSON", f"not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise InvalidConversation(where, TOO_DEEP, TOO_DEEP) from None


def read_json_records(file: Path) -> Records:
    """Read JSON lines, an array of records, or records one after the other, each over several lines.

    Yields:
        (`file line 3`, record); a line that is not JSON, or not UTF-8, comes as an `InvalidConversation` in the
        record's place.

    Raises:
        UserError: The file is empty or cannot be decompressed; or, unless its records are lines, it is not UTF-8, or a
            record no JSON.
    """
    from zstandard import ZstdError

    try:
        with _open_bytes(file) as stream:
            head = stream.readline(HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
            while head and not head.strip():
                head = stream.readline(HEAD_BYTES)
        if _goes_on_over_lines(head):
            with _open_bytes(file) as stream:
                text = stream.read().decode("utf-8-sig")
            if not text.lstrip().startswith("{") or _first_value_ends(text):
                yield from _spread_records(file, text)
                return
        with _open_bytes(file) as stream:
            yield from _line_records(file, stream)
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text: {CONVERT}") from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, ZstdError, EOFError) as error:
        raise UserError(f"{file} cannot be decompressed ({error or 'it ends too early'}): fetch it again") from None


@contextmanager
def _open_bytes(file: Path) -> Iterator[BinaryIO]:
    with file.open("rb") as raw:
        if file.suffix == ".zst":
            import zstandard

            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
                yield cast(BinaryIO, io.BufferedReader(cast(Any, stream)))
        elif file.suffix in (".gz", ".xz"):
            with (gzip if file.suffix == ".gz" else lzma).open(raw) as stream:
                yield cast(BinaryIO, stream)
        else:
            yield raw


def _line_records(file: Path, stream: BinaryIO) -> Records:
    number, empty = 0, True
    while line := stream.readline(MOST_RECORD_BYTES + 1):
        number += 1
        rest = line
        while len(line) > MOST_RECORD_BYTES and rest and not rest.endswith(b"\n"):
            rest = stream.readline(HEAD_BYTES)
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        empty, where = False, f"{file} line {number}"
        try:
            record = json_of(line, where)
        except InvalidConversation as error:
            record = error
        yield where, record
    if empty:
        raise UserError(f"{file} is empty: it must hold one JSON conversation a line, or a JSON array of them")


def _goes_on_over_lines(head: bytes) -> bool:
    """Whether the first line is an array or `{"data": [`, or JSON of which nothing but the rest is missing."""
    text = head.decode("utf-8", errors="replace").strip()
    if text.startswith("[") or CONTAINER.match(text):
        return True
    try:
        DECODER.decode(text)
    except json.JSONDecodeError as error:
        return text.startswith("{") and len(head) < HEAD_BYTES and error.pos >= len(text)
    except RecursionError:
        pass
    return False


def _first_value_ends(text: str) -> bool:
    """Whether the file begins with JSON; else what is wrong is told line by line."""
    with suppress(json.JSONDecodeError, RecursionError):
        DECODER.raw_decode(text, _after_blanks(text, 0))
        return True
    return CONTAINER.match(text, _after_blanks(text, 0)) is not None


def _spread_records(file: Path, text: str) -> Records:
    """The records of an array, of `{"data": [...]}`, or of values one after the other."""
    at, number = _after_blanks(text, 0), 0
    container = CONTAINER.match(text, at)
    in_list = container is not None or text[at] == "["
    at = container.end() if container is not None else at + in_list

    def problem(place: int, what: str) -> UserError:
        return UserError(f"{file} line {1 + text.count(chr(10), 0, place)} {what}")

    while True:
        at = _after_blanks(text, at)
        is_over = text.startswith("]", at) and number == 0 if in_list else at == len(text)
        if is_over:
            at += 1
            break
        number += 1
        try:
            record, at = DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise problem(error.pos, f"is not JSON: {error.msg}") from None
        except RecursionError:
            raise problem(at, f"is {TOO_DEEP}") from None
        yield f"{file} conversation {number}", record
        if in_list:
            at = _after_blanks(text, at) + 1
            if text[at - 1 : at] not in (",", "]"):
                raise problem(at - 1, "is not JSON: a comma or ] is missing")
            if text[at - 1] == "]":
                break
    at = _after_blanks(text, at)
    if container is not None and not text.startswith(("}", ","), at):  # with what else there may be about the data
        raise problem(at, "is not JSON: a } is missing")
    if in_list and container is None and at < len(text):
        raise problem(at, "is not JSON: there is text after the array")


def _after_blanks(text: str, at: int) -> int:
    return BLANK.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too


# ---- what a record says ----


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
        what = f"a conversation must be a JSON object, not {json_kind(record)}"
        raise InvalidConversation(where, "not a mapping", what)
    turns = _listed_turns(record, where) if columns.prompt is None else None
    if turns is None:
        turns = _turns_of_columns(record, where, columns)
    if turns is None:
        lists = [
            key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        hint = f": if {listed(lists[:1])} holds the conversations, write that list alone into the file" if lists else ""
        raise InvalidConversation(
            where,
            "no conversation key",
            "a conversation needs the key `conversations` (ShareGPT), `messages` (OpenAI) or a prompt column "
            f"(data.conversations.columns.prompt names it), this one has {listed(record)}{hint}",
        )
    _check_turns(turns, where)
    tools = _tools_of(record.get("tools"), where)
    return Conversation(conversation_id(turns, tools), turns, tools=tools)


def conversation_id(turns: tuple[Turn, ...], tools: tuple[Tool, ...] = ()) -> str:
    """The hash of the turns that a regeneration does not change, and of the tools."""
    prompt_side: list[Any] = [[turn.role, turn.content] for turn in turns if turn.role != "assistant"]
    text = json.dumps(prompt_side + list(tools), ensure_ascii=True)
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
    found = next((each for each in FORMATS if record.get(each[0]) is not None), None)
    if found is None:
        return None
    list_key, role_key, text_key, roles = found
    messages = record[list_key]
    if not isinstance(messages, list):
        what = f"`{list_key}` must be a list of turns, not {json_kind(messages)}"
        raise InvalidConversation(where, "not a list of turns", what)
    turns = []
    for number, message in enumerate(messages, start=1):
        turns.append(_turn(message, role_key, text_key, roles, f"{where}, turn {number}"))
    return tuple(turns)


def _turn(message: Any, role_key: str, text_key: str, roles: dict[str, Role], here: str) -> Turn:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(message, dict) or role_key not in message or (text_key not in message and not calls):
        what = f"a turn must be an object with `{role_key}` and `{text_key}`"
        raise InvalidConversation(here, "malformed turn", what)
    name = message[role_key]
    if not isinstance(name, str) or name not in roles:
        shown = json.dumps(name[:LONGEST_NAME]) if isinstance(name, str) else json_kind(name)
        raise InvalidConversation(here, "unknown role", f"unknown role {shown}, known ones are {', '.join(roles)}")
    role, content = roles[name], message.get(text_key)
    content = "" if content is None and (calls or role == "tool") else text_of(content, here)
    if name == CALL_AS_TEXT:
        calls, content = _read_json(content, f"the {CALL_AS_TEXT}", here), ""
        calls = calls if isinstance(calls, list) else [calls]
    if calls and role != "assistant":
        raise InvalidConversation(here, BAD_CALL, f"a {role} turn calls tools, which only the assistant does")
    if calls is not None and not isinstance(calls, list):
        raise InvalidConversation(here, BAD_CALL, f"`tool_calls` must be a list, not {json_kind(calls)}")
    if not content.strip() and not calls and role != "tool":  # a tool may well have nothing to say
        raise InvalidConversation(here, f"empty {role} turn", f"the {name} turn is empty")
    told = {
        key: value for key in ("name", "tool_call_id") if role == "tool" and isinstance(value := message.get(key), str)
    }
    return Turn(role, content, tuple(_call(call, here) for call in calls or ()), **told)


def _call(call: Any, here: str) -> dict[str, Any]:
    """OpenAI's call, or what is in it: {"name": ..., "arguments": ...}, the arguments an object or its JSON text."""
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


def _read_json(text: str, what: str, where: str) -> Any:
    try:
        return DECODER.decode(text)
    except (json.JSONDecodeError, RecursionError):
        raise InvalidConversation(where, BAD_CALL, f"{what} must be JSON") from None


def _turns_of_columns(record: dict[str, Any], where: str, columns: ColumnsRecipe) -> tuple[Turn, ...] | None:
    """The turns of a record with a prompt column; None if it has none.

    An answer that is not there is an empty assistant turn, or none at the end.
    """

    def texts_in(column: str) -> list[str]:
        values = record[column] if isinstance(record[column], list) else [record[column]]
        return [text_of(text, f"{where}, `{column}`") for text in values]

    def text_in(key: str) -> str:
        column = _column(record, where, key, columns)
        return "" if column is None else text_of(record[column], f"{where}, `{column}`")

    prompt_column = _column(record, where, "prompt", columns)
    if prompt_column is None:
        return None
    prompts = texts_in(prompt_column)
    if prompts and (below := text_in("input")).strip():
        prompts[0] += f"\n\n{below}"
    system = text_in("system")
    turns = [Turn("system", system)] if system.strip() else []
    answers = [""] * len(prompts)
    answer_column = _column(record, where, "answer", columns)
    if answer_column is not None:
        value = record[answer_column]
        given = value if isinstance(value, list) else [value]
        if len(given) == len(prompts) and all(isinstance(text, str) for text in given):
            answers = texts_in(answer_column)
        elif columns.answer is not None:  # else it is a choice's number, for instance: not what the recipe asked for
            what = f"`{answer_column}` must hold one text for each of the {len(prompts)} prompts"
            raise InvalidConversation(where, "answers do not fit the prompts", what)
    for prompt, answer in zip(prompts, answers, strict=True):
        if not prompt.strip():
            raise InvalidConversation(where, "empty user turn", f"`{prompt_column}` is empty")
        turns += [Turn("user", prompt), Turn("assistant", answer if answer.strip() else "")]
    while turns and turns[-1] == Turn("assistant", ""):
        turns.pop()
    return tuple(turns)


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
    characters = sum(len(turn.content) + sum(map(len, map(str, turn.tool_calls))) for turn in turns)
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
