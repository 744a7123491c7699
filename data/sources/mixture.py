"""The recipe's conversations: the records of all sources, each validated, new, clean and wanted, in their shares.

A record is left out for the first reason that applies, in this order: it is invalid; its prompts, but for case and
white space, came before, from whatever source; it belongs to the other split; it repeats an evaluation question; a
filter excludes it. Each is counted.
"""

import hashlib
import heapq
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from draftsmith.data.sources.contamination import Contamination
from draftsmith.data.sources.conversation import Conversation, InvalidConversation
from draftsmith.data.sources.counts import SourceCounts, Tally, counted_reasons
from draftsmith.data.sources.filters import Filters
from draftsmith.data.sources.parsing import is_heldout, parse_conversation
from draftsmith.data.sources.records import STDLIB, open_records
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MixedSourceRecipe, Recipe

KEY_BYTES = 16
T = TypeVar("T")


def load_conversations(
    recipe: Recipe, counts: SourceCounts | None = None, tokenizer: Any = None
) -> Iterator[Conversation]:
    """Yield the conversations that the recipe asks for, one at a time; the order depends on nothing but the sources.

    Args:
        recipe: Its `data` section is used, and `eval.questions` by default to decontaminate.
        counts: Receives what became of every record.
        tokenizer: The target's, for `filters.max_tokens`, which is not applied without one.

    Raises:
        UserError: A source is missing or unreadable, a record is invalid, or nothing is left.
    """
    conversations = recipe.data.conversations
    counts = counts if counts is not None else SourceCounts()
    intake = _Selection(recipe, counts, tokenizer)
    streams = [(source.weight, intake.usable(source)) for source in conversations.sources]
    empty = True
    for conversation in islice(interleave(streams), conversations.limit):
        empty = False
        yield conversation
    if empty:
        names = ", ".join(source.source for source in conversations.sources)
        key = "mixture" if conversations.mixture else "source"
        total = counts.total
        skipped = f": {counted_reasons(total.invalid)} skipped as invalid" if total.invalid else ""
        left_out = (
            (total.other_split, "of the other split"),
            (total.contaminated.total(), "contaminated"),
            (total.filtered.total(), "filtered out"),
        )
        unwanted = ", ".join(f"{count} {what}" for count, what in left_out if count)
        raise UserError(
            f"{names} holds no valid conversation{skipped}{f' ({unwanted})' if unwanted else ''}; "
            f"set data.conversations.{key} to another"
        )


def interleave(streams: list[tuple[float, Iterator[T]]]) -> Iterator[T]:
    """Take from (weight, stream) pairs so that each has its share after any number of items, to about one item.

    The n-th item of a stream is due at (n - 1/2) / weight, as Webster's method gives out seats; among equals the first
    stream goes first. One that runs dry is left out from then on.
    """
    due = [(0.5 / weight, index, 1) for index, (weight, _) in enumerate(streams)]
    heapq.heapify(due)
    while due:
        _, index, number = due[0]
        weight, stream = streams[index]
        try:
            item = next(stream)
        except StopIteration:
            heapq.heappop(due)
            continue
        heapq.heapreplace(due, ((number + 0.5) / weight, index, number + 1))
        yield item


class _Selection:
    """What the sources have in common: the prompts that came before, the questions to avoid, and the filters."""

    def __init__(self, recipe: Recipe, counts: SourceCounts, tokenizer: Any) -> None:
        self._recipe, self._counts = recipe, counts
        conversations = recipe.data.conversations
        self._seen: set[bytes] = set()
        self._contamination = Contamination(question_sources(recipe), conversations.contamination_words)
        self._filters = Filters(conversations.filters, tokenizer)

    def usable(self, source: MixedSourceRecipe) -> Iterator[Conversation]:
        """Those of one source that are left, up to its own limit."""
        conversations = self._recipe.data.conversations
        tally = self._counts.by_source.setdefault(source.label, Tally())
        for where, record in open_records(source, conversations.split):
            tally.read += 1
            try:
                conversation = self._parse(record, where, source)
            except InvalidConversation as error:
                if not conversations.skip_invalid:
                    raise
                tally.invalid[error.reason] += 1
                continue
            if self._is_left_out(conversation, source, tally):
                continue
            tally.kept += 1
            yield replace(conversation, source=source.label)
            if tally.kept == source.limit:
                return

    def _parse(self, record: Any, where: str, source: MixedSourceRecipe) -> Conversation:
        if isinstance(record, InvalidConversation):
            raise record
        conversation = parse_conversation(record, where, source.columns)
        if self._recipe.data.distill.engine == "none" and not conversation.is_answered:
            sentence = (
                "a question has no answer, and with data.distill.engine: none nobody gives one "
                "(with another engine the target does)"
            )
            raise InvalidConversation(where, "no answer", sentence)
        return conversation

    def _is_left_out(self, conversation: Conversation, source: MixedSourceRecipe, tally: Tally) -> bool:
        recipe = self._recipe.data.conversations
        key = near_duplicate_key(conversation)
        if key in self._seen:
            tally.duplicates += 1
            return True
        self._seen.add(key)
        if recipe.split != "all" and source.source != STDLIB:
            belongs_to = "heldout" if is_heldout(conversation.id, recipe.heldout_frac) else "train"
            if belongs_to != recipe.split:
                tally.other_split += 1
                return True
        match = self._contamination.find(conversation)
        if match is not None:
            tally.contaminated[match.reason] += 1
            self._counts.contaminated_ids[conversation.id] = match.question
            return True
        reason = self._filters.find(conversation)
        if reason is not None:
            tally.filtered[reason] += 1
            return True
        return False


def near_duplicate_key(conversation: Conversation) -> bytes:
    """A hash of the prompt side that case and white space do not change."""
    prompts = [[t.role, " ".join(t.content.casefold().split())] for t in conversation.turns if t.role != "assistant"]
    return hashlib.sha256(json.dumps(prompts).encode()).digest()[:KEY_BYTES]


def question_sources(recipe: Recipe) -> list[str]:
    """The question files that conversations are kept apart from."""
    named = recipe.data.conversations.decontaminate
    return [recipe.eval.questions] if named is None else named
