"""The recipe's conversations: every source's records validated, without duplicates, up to the limit."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from draftsmith.data.conversations import Conversation, InvalidConversation, counted_reasons, parse_conversation
from draftsmith.data.source_records import open_records
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe


@dataclass
class SourceCounts:
    """What was left out, by reason; filled while `load_conversations` is consumed."""

    invalid: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0


def load_conversations(recipe: Recipe, counts: SourceCounts | None = None) -> Iterator[Conversation]:
    """Yield the first `limit` valid, distinct conversations of the recipe's source.

    Args:
        recipe: Its `data` section is used, and its `seed` by `stdlib`, which builds its conversations.
        counts: Receives how many records were skipped or were duplicates.

    Raises:
        UserError: The source is missing, unreadable or holds nothing valid, or a record is invalid.
    """
    source = recipe.data.conversations
    counts = counts if counts is not None else SourceCounts()
    seen: set[str] = set()
    for where, record in open_records(source, recipe.seed, source.split):
        if source.limit is not None and len(seen) >= source.limit:
            return
        try:
            if isinstance(record, InvalidConversation):
                raise record
            conversation = parse_conversation(record, where, source.columns)
            if recipe.data.distill.engine == "none" and not conversation.is_answered:
                raise _unanswered(where)
        except InvalidConversation as error:
            if not source.skip_invalid:
                raise
            counts.invalid[error.reason] += 1
            continue
        if conversation.id in seen:
            counts.duplicates += 1
            continue
        seen.add(conversation.id)
        yield conversation
    if not seen:
        skipped = f": {counted_reasons(counts.invalid)} skipped as invalid" if counts.invalid else ""
        raise UserError(
            f"{source.source} holds no valid conversation{skipped}; set data.conversations.source to another"
        )


def _unanswered(where: str) -> InvalidConversation:
    sentence = (
        "a question has no answer, and with data.distill.engine: none nobody gives one "
        "(with another engine the target does)"
    )
    return InvalidConversation(where, "no answer", sentence)
