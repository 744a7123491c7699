"""Distilled sets: conversations whose answers a target gave, with the answers' token ids.

    card.json    who answered, and how; hashes of the files
    shards/*     finished conversations, one per line of JSON, plain or compressed

A run's data folder has this form, and so has the dataset repository that `draftsmith push --data` writes. With
`engine: none` the answers and their token ids are used as the target's own; with another engine, only the prompts are.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from huggingface_hub import hf_hub_download, snapshot_download
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from draftsmith.data.sources.conversation import Conversation, Role, Turn, common_length
from draftsmith.data.sources.files import InvalidConversation, Records, is_hub_name, read_records
from draftsmith.errors import UserError
from draftsmith.files import file_sha256, read_json
from draftsmith.hub import hub_errors
from draftsmith.recipes.conversations import SourceRecipe
from draftsmith.recipes.schema import Recipe, TargetRecipe

CARD_JSON, SHARDS = "card.json", "shards"
LET_IT_ANSWER = "or let this target answer the prompts, with a data.distill.engine other than none"


class _Function(TypedDict):
    name: str
    arguments: dict[str, Any]


class _ToolCall(TypedDict):
    type: str
    function: _Function
    id: NotRequired[str]


class _Message(TypedDict):
    role: Role
    content: str
    tool_calls: NotRequired[list[_ToolCall]]
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]
    weight: NotRequired[int]


class _Prompt(TypedDict):
    """Ids of a prompt: the first `shared` tokens of the prompt before it, followed by its answer, and then `ids`."""

    shared: int
    ids: list[int]


class DistilledLine(TypedDict):
    """A line of a file in `shards/`: one finished conversation. reason: why later answers are missing, or null."""

    id: str
    reason: str | None
    messages: list[_Message]
    source: NotRequired[str]
    tools: NotRequired[list[dict[str, Any]]]
    answer_ids: NotRequired[list[list[int] | None]]
    prompt_ids: NotRequired[list[_Prompt | None]]


_LINE: TypeAdapter[Any] = TypeAdapter(DistilledLine)


def kept_record(conversation: Conversation) -> dict[str, Any]:
    """Convert a finished conversation to a record, a line of a file in `shards/`."""
    record: dict[str, Any] = {"id": conversation.id, "reason": conversation.shortened, "source": conversation.source}
    record["messages"] = conversation.messages
    record |= {"tools": list(conversation.tools)} if conversation.tools else {}
    if not conversation.answer_ids:
        return record
    record["answer_ids"] = list(conversation.answer_ids)
    prompts: list[_Prompt | None] = []
    before: list[int] = []
    for prompt_ids, answer_ids in zip(conversation.prompt_ids, conversation.answer_ids, strict=False):
        shared = common_length(before, prompt_ids or [])
        prompts.append(None if prompt_ids is None else {"shared": shared, "ids": prompt_ids[shared:]})
        before = (prompt_ids or []) + (answer_ids or [])
    return record | ({"prompt_ids": prompts} if any(prompts) else {})


def kept_conversation(record: dict[str, Any]) -> Conversation:
    """Convert a valid record, a line of a file in `shards/`, to a conversation."""
    turns = tuple(
        Turn(**{**message, "tool_calls": tuple(message.get("tool_calls", ()))}) for message in record["messages"]
    )
    answer_ids = record.get("answer_ids") or [None] * sum(turn.role == "assistant" for turn in turns)
    prompts: list[list[int] | None] = []
    before: list[int] = []
    for prompt, answer in zip(record.get("prompt_ids") or (), answer_ids, strict=False):
        prompts.append(None if prompt is None else before[: prompt["shared"]] + prompt["ids"])
        before = (prompts[-1] or []) + (answer or [])
    return Conversation(
        record["id"],
        turns,
        record.get("source", ""),
        tuple(record.get("tools", ())),
        tuple(answer_ids),
        record["reason"],
        tuple(prompts),
    )


@dataclass(frozen=True)
class _Target:
    model: str
    weights: str | None = None


@dataclass(frozen=True)
class _Hashes:
    chat_template: str
    vocabulary: str
    data_files: dict[str, str]


@dataclass(frozen=True)
class _Card:
    """The part of `card.json` that says whose answers these are."""

    answered_by: str
    target: _Target
    engine: dict[str, Any]
    hashes: _Hashes


@dataclass(frozen=True)
class DistilledSet:
    """A distilled set, conversations with a target's answers, in a local folder. name: its source in the recipe."""

    name: str
    folder: Path
    card: _Card = field(repr=False)

    def records(self) -> Records:
        """Read the (place, record) pairs of the conversations, as `read_records` does.

        Raises:
            UserError: A file is missing, or its SHA-256 is not the one in `card.json`.
        """
        for name, expected in sorted(self.card.hashes.data_files.items()):
            file = self.folder / SHARDS / Path(name).name
            if not file.is_file() or file_sha256(file) != expected:
                what = "has another hash than" if file.is_file() else "is missing, though it is"
                raise UserError(f"{file} {what} in {self.folder / CARD_JSON}: fetch or write {self.name} again")
            yield from read_records(file)

    def check_target(self, target: TargetRecipe, tokenizer: Any, weights: str | None) -> None:
        """Check that this target, or a quantised copy of it, gave the answers, with the same tokenizer and template.

        Args:
            weights: Hash of the target's weights.

        Raises:
            UserError: Another model answered, or none did, or the target's tokenizer or chat template is another one.
        """
        card = self.card
        if card.engine.get("engine") == "none":
            raise UserError(
                f"data.conversations.source {self.name}: no target gave its answers, as it was made with "
                f"data.distill.engine none: name the conversations file that it was made from, {LET_IT_ANSWER}"
            )
        known = {card.target.weights, card.engine.get("weights")} - {None}
        if (weights not in known) if known and weights else (card.target.model != target.display_name):
            theirs = f"{card.answered_by} (weights {card.engine.get('weights') or 'unknown'})"
            raise UserError(
                f"data.conversations.source {self.name} has the answers of {theirs}, and target.model is "
                f"{target.display_name} (weights {weights or 'unknown'}): name the target that answered, "
                f"{LET_IT_ANSWER}"
            )
        for key, digest in tokenizer_hashes(tokenizer).items():
            if digest != getattr(card.hashes, key):
                raise UserError(
                    f"data.conversations.source {self.name}: {card.answered_by} answered with another "
                    f"{key.replace('_', ' ')} (SHA-256 {getattr(card.hashes, key)[:16]}) than this target has "
                    f"({digest[:16]}): set target.chat_template and target.chat_template_kwargs as they were, "
                    f"{LET_IT_ANSWER}"
                )


def kept_answers(record: Any, where: str) -> Conversation:
    """Convert a record of a distilled set to a conversation, with its answers and their token ids.

    Raises:
        InvalidConversation: The record does not have the form of a line of `shards/`.
    """
    try:
        return kept_conversation(_LINE.validate_python(record, strict=True))
    except ValidationError as error:
        first = error.errors()[0]
        what = f"not a distilled conversation ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        raise InvalidConversation(where, "not a distilled conversation", what) from None


def find_distilled(source: SourceRecipe) -> DistilledSet | None:
    """Return the distilled set that a source names, a folder or a Hub dataset (downloaded); None for other sources.

    Raises:
        UserError: The folder's `card.json` is damaged, or the Hub's files cannot be downloaded.
    """
    name, folder = source.source, Path(source.source)
    if source.file is not None:
        return None
    if not folder.exists() and "/" in name and is_hub_name(name):
        where: dict[str, Any] = {"repo_type": "dataset", "revision": source.revision}
        try:
            read_json(Path(hf_hub_download(name, CARD_JSON, **where)), _Card, "")
        except Exception:  # no such file, one of another kind, no network: left to `open_records`
            return None
        with hub_errors("nothing was read", name):
            folder = Path(snapshot_download(name, allow_patterns=[CARD_JSON, f"{SHARDS}/*"], **where))
    if not (folder / CARD_JSON).is_file():
        return None
    return DistilledSet(name, folder, read_json(folder / CARD_JSON, _Card, "run `draftsmith distill` there again"))


def check_answers(recipe: Recipe, tokenizer: Any, weights: str | None) -> None:
    """Check all distilled sets of a recipe that uses their answers (`engine: none`), by `DistilledSet.check_target`."""
    if recipe.data.distill.engine == "none":
        for source in recipe.data.conversations.sources:
            if (found := find_distilled(source)) is not None:
                found.check_target(recipe.target, tokenizer, weights)


def tokenizer_hashes(tokenizer: Any) -> dict[str, str]:
    """Return the SHA-256 of a tokenizer's vocabulary (`vocabulary`) and of its chat template (`chat_template`)."""
    parts = {"vocabulary": json.dumps(tokenizer.get_vocab(), sort_keys=True)}
    parts["chat_template"] = undated_template(tokenizer)
    return {name: hashlib.sha256(str(part).encode()).hexdigest() for name, part in parts.items()}


def undated_template(tokenizer: Any) -> str:
    """Return the chat template's text; if `freeze_date` put a fixed date in place of today's, the text before that."""
    return str(getattr(tokenizer, "undated_chat_template", tokenizer.chat_template))
