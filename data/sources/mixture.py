"""The recipe's conversations: the records of all sources, validated and deduplicated, in their shares.

A record is left out for the first reason that applies, in this order: it is invalid; a record with the same prompts,
apart from case and white space, came before from any source (with `engine: none`, the same prompts and answers: several
answers to one prompt are several conversations); it belongs to the other split; it repeats an evaluation question. Each
reason is counted for reports, and so are the keys of records that nothing reads.
"""

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from draftsmith.data.sources.conversation import Conversation, answered_id
from draftsmith.data.sources.distilled import find_distilled, kept_answers
from draftsmith.data.sources.files import STDLIB, InvalidConversation, open_records
from draftsmith.data.sources.questions import Contamination
from draftsmith.data.sources.record_reader import NoQuestion, parse_conversation
from draftsmith.data.sources.turns import MOST_NAMES, listed
from draftsmith.errors import UserError
from draftsmith.recipes.conversations import MixedSourceRecipe
from draftsmith.recipes.schema import Recipe

KEY_BYTES = 16
MOST_UNREAD_KEYS = 1000  # most different unread keys to count for a source

T = TypeVar("T")


def counted_reasons(counts: Counter[str]) -> str:
    """Format counts by reason for reports, as `3 (2 empty turn, 1 not JSON)`, `2 (not JSON)`, or `0`."""
    details = ", ".join(f"{count} {reason}" if len(counts) > 1 else reason for reason, count in counts.most_common())
    return f"{counts.total()} ({details})" if counts else "0"


@dataclass
class Tally:
    """Counts of one source's records. Each record of `read` is in exactly one of the counts up to `kept`.

    unread_keys: for each key that nothing reads, the number of valid records that have it. repaired: number of valid
    records of which a part was left out, by the kind of repair.
    """

    read: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    other_split: int = 0
    contaminated: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    unread_keys: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)

    def sentence(self) -> str:
        """Return the counts in one line, for the console."""
        parts = [f"{self.kept} of {self.read} records kept"]
        for name in ("repaired", "invalid", "duplicates", "other_split", "contaminated"):
            value = getattr(self, name)
            count = counted_reasons(value) if isinstance(value, Counter) else value
            parts += [f"{name.replace('other_split', 'of the other split')}: {count}"] if value else []
        unread = [f"{listed([key])} ({count})" for key, count in self.unread_keys.most_common(MOST_NAMES)]
        unread += ["..."] if len(self.unread_keys) > MOST_NAMES else []
        parts += [f"keys not read: {', '.join(unread)}"] if unread else []
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return the counts for `card.json`."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


@dataclass
class SourceCounts:
    """Counts of all sources, by name; filled while `load_conversations` is consumed.

    contaminated_ids: by id of a conversation left out as contaminated, the evaluation question that it repeats.
    """

    by_source: dict[str, Tally] = field(default_factory=dict)
    contaminated_ids: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> Tally:
        """Return the sum of the counts of all sources."""
        total = Tally()
        for tally in self.by_source.values():
            for name, value in vars(tally).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def sentence(self) -> str:
        """Return the counts in one line per source."""
        return "\n".join(f"{name}: {tally.sentence()}" for name, tally in self.by_source.items())


def load_conversations(recipe: Recipe, counts: SourceCounts | None = None) -> Iterator[Conversation]:
    """Yield the recipe's conversations one at a time, in an order that depends on the sources alone.

    Args:
        recipe: Recipe whose `data` section is used, and by default its `eval.questions` for decontamination.
        counts: Receives the counts of kept and dropped records while this iterates.

    Raises:
        UserError: A source is missing or unreadable, a record is invalid, or nothing is left.
    """
    conversations = recipe.data.conversations
    counts = counts if counts is not None else SourceCounts()
    intake = _Selection(recipe, counts)
    sources = [(source.weight, intake.usable(source)) for source in conversations.sources]
    empty = True
    for conversation in islice(interleave(sources), conversations.limit):
        empty = False
        yield conversation
    if empty:
        names = ", ".join(source.source for source in conversations.sources)
        key, total = "mixture" if conversations.mixture else "source", counts.total
        skipped = f": {counted_reasons(total.invalid)} skipped as invalid" if total.invalid else ""
        unwanted = [f"{total.other_split} of the other split"] if total.other_split else []
        unwanted += [f"{total.contaminated.total()} contaminated"] if total.contaminated else []
        more = f" ({', '.join(unwanted)})" if unwanted else ""
        raise UserError(f"{names} holds no valid conversation{skipped}{more}; set data.conversations.{key} to another")


def interleave(sources: list[tuple[float, Iterator[T]]]) -> Iterator[T]:
    """Yield items of (weight, iterator) pairs so that each has its share by weight at any time, to about one item.

    The n-th item of an iterator is due at (n - 1/2) / weight, as in Webster's method; if several are due, the first
    iterator goes first. An exhausted iterator is left out from then on.
    """
    due = [(0.5 / weight, index, 1) for index, (weight, _) in enumerate(sources)]
    heapq.heapify(due)
    while due:
        _, index, number = due[0]
        weight, items = sources[index]
        try:
            item = next(items)
        except StopIteration:
            heapq.heappop(due)
            continue
        heapq.heapreplace(due, ((number + 0.5) / weight, index, number + 1))
        yield item


class _Selection:
    """State shared by all sources: the prompts seen so far, and the evaluation questions to avoid."""

    def __init__(self, recipe: Recipe, counts: SourceCounts) -> None:
        self._recipe, self._counts = recipe, counts
        self._keeps_answers = recipe.data.distill.engine == "none"
        self._seen: set[bytes] = set()
        self._contamination = Contamination(question_sources(recipe))

    def usable(self, source: MixedSourceRecipe) -> Iterator[Conversation]:
        """Yield the conversations of one source that are not left out, at most as many as its own limit."""
        conversations = self._recipe.data.conversations
        tally = self._counts.by_source.setdefault(source.label, Tally())
        distilled = find_distilled(source)
        records = open_records(source, conversations.split) if distilled is None else distilled.records()
        for where, record in records:
            tally.read += 1
            unread, repaired = Counter[str](), Counter[str]()
            try:
                if isinstance(record, InvalidConversation):
                    raise record
                if distilled is not None and self._keeps_answers:
                    conversation = kept_answers(record, where)
                else:
                    conversation = parse_conversation(
                        record, where, source.columns, self._keeps_answers, unread, repaired
                    )
                if self._keeps_answers:
                    _check_answers(conversation, where)
            except InvalidConversation as error:
                if not (conversations.skip_invalid or isinstance(error, NoQuestion)):
                    raise
                tally.invalid[error.reason] += 1
                continue
            tally.repaired += repaired
            if source.source != STDLIB:
                counted = tally.unread_keys
                counted.update(key for key in unread if key in counted or len(counted) < MOST_UNREAD_KEYS)
            if self._is_left_out(conversation, source, tally):
                continue
            tally.kept += 1
            key = answered_id(conversation) if self._keeps_answers else conversation.id
            yield replace(conversation, id=key, source=source.label)
            if tally.kept == source.limit:
                return

    def _is_left_out(self, conversation: Conversation, source: MixedSourceRecipe, tally: Tally) -> bool:
        """Count the first reason to leave a valid conversation out, if there is any."""
        recipe, turns = self._recipe.data.conversations, conversation.turns
        prompts = [[turn.role, " ".join(turn.content.casefold().split())] for turn in turns if turn.role != "assistant"]
        offered = list(conversation.tools)  # the same question with other tools is another one
        answers = [turn.message for turn in turns if turn.role == "assistant"] if self._keeps_answers else []
        key = hashlib.sha256(json.dumps([*prompts, *offered, *answers]).encode()).digest()[:KEY_BYTES]
        if key in self._seen:
            tally.duplicates += 1
            return True
        self._seen.add(key)
        if recipe.split != "all" and source.source != STDLIB:
            # The split depends on the id alone, so that it does not change when conversations are added.
            digest = hashlib.sha256(f"heldout {conversation.id}".encode()).digest()
            is_heldout = int.from_bytes(digest[:8], "big") / 2**64 < recipe.heldout_frac
            if is_heldout != (recipe.split == "heldout"):
                tally.other_split += 1
                return True
        if match := self._contamination.find(conversation):
            tally.contaminated[match.reason] += 1
            self._counts.contaminated_ids[conversation.id] = match.question
            return True
        return False


def _check_answers(conversation: Conversation, where: str) -> None:
    """Check a conversation whose own answers are used.

    Raises:
        InvalidConversation: A question has no answer, or no answer is to be learned.
    """
    if not conversation.is_answered:
        sentence = (
            "a question has no answer, and data.distill.engine: none adds none "
            "(with another engine the target answers it)"
        )
        has_none = all(turn.is_empty for turn in conversation.turns if turn.role == "assistant")
        raise (NoQuestion if has_none else InvalidConversation)(where, "no answer", sentence)
    if not any(turn.role == "assistant" and turn.weight for turn in conversation.turns):
        raise InvalidConversation(
            where, "no answer to learn", "every answer has a weight of 0, so that none is trained on"
        )


def question_sources(recipe: Recipe) -> list[str]:
    """Return the names or files of the evaluation questions that training conversations must not repeat."""
    named = recipe.data.conversations.decontaminate
    return recipe.eval.question_sets if named is None else named
