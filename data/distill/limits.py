"""Limits of the target, read from its config: checked before distillation and before training.

Without these checks a token id beyond the embedding, or a sequence beyond learned positions, ends in an error of the
device after the expensive part; a sequence beyond rotary positions is trained without a warning.
"""

import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute

from draftsmith.data.distill.token_dataset import row_lengths
from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.sources.mixture import SourceCounts
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.tokens.templates import PROBE, TemplateProblem, chosen_template, thoughts_field
from draftsmith.errors import UserError
from draftsmith.models.target.windows import hiding_from, rope_switch
from draftsmith.recipes.schema import Recipe

SAMPLE_PROMPTS = 64
EXTENDED_ROPE = ("linear", "yarn")  # read `factor` times as many positions as they were trained on
ITS_TOKENIZER = "use the tokenizer that belongs to the target, or resize the target's embedding and save the target"
DISTIL_AGAIN = "delete that folder and run `draftsmith distill` again"
OUTSIDE = "tokens beyond the target's embedding"


@dataclass(frozen=True)
class TargetLimits:
    """Sizes of a target: rows of its embedding, and tokens of its longest sequence; None where its config has none.

    rope_switch: tokens beyond which one row changes the features of all rows of its batch.
    """

    vocabulary_size: int | None = None
    positions: int | None = None
    rope_switch: int | None = None

    def refusal(self, length_tokens: int) -> str:
        """Return why the target cannot train a drafter on rows of this length, with the way out; empty if it can."""
        limit, why = self.positions, "the target has {:,} positions"
        if self.rope_switch is not None and length_tokens > self.rope_switch:
            limit = self.rope_switch
            why = "the target's RoPE changes for all rows of a batch with one beyond {:,} tokens"
        if limit is None or length_tokens <= limit:
            return ""
        return f"{why.format(limit)}: set data.max_length_tokens to {limit} at most"


def target_limits(config: Any) -> TargetLimits:
    """Read the limits from a model's config, or from its text part if it is multimodal."""
    text, switch = config.get_text_config(), rope_switch(config)
    vocabulary_size, positions = (getattr(text, key, None) for key in ("vocab_size", "max_position_embeddings"))
    if not isinstance(positions, int):
        return TargetLimits(vocabulary_size, None, switch)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        factor, trained = part.get("factor"), part.get("original_max_position_embeddings") or positions
        if part.get("rope_type", part.get("type")) in EXTENDED_ROPE and factor is not None:
            positions = max(positions, int(factor * trained))
    return TargetLimits(vocabulary_size, min(positions, hiding_from(config) or positions), switch)


@lru_cache(maxsize=8)
def highest_id(tokenizer: Any) -> int:
    """Return the highest id of a tokenizer's vocabulary."""
    return max(tokenizer.get_vocab().values(), default=0)


def outside_tokens(tokenizer: Any, conversation: Conversation, limits: TargetLimits, answers: bool) -> list[str]:
    """Return the tokens of a conversation whose ids are beyond the target's embedding, as `token (id N)`.

    Args:
        answers: Whether to check the assistant's turns too.
    """
    size = limits.vocabulary_size
    if size is None or highest_id(tokenizer) < size:
        return []
    texts = [
        text
        for turn in conversation.turns
        if answers or turn.role != "assistant"
        for text in (turn.content, turn.reasoning_content)
    ]
    ids = {each for row in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] for each in row}
    return [f"{tokenizer.convert_ids_to_tokens(each)} (id {each})" for each in sorted(ids) if each >= size]


def check_template_tokens(tokenizer: Any, limits: TargetLimits) -> None:
    """Check that the chat template writes no tokens into a prompt that are beyond the target's embedding.

    Raises:
        UserError: A token of the template is beyond the target's embedding.
    """
    size = limits.vocabulary_size
    outside = [each for each in prompt_token_ids(tokenizer, PROBE[:1]) if size is not None and each >= size]
    if outside:
        raise UserError(
            f"the target's chat template writes {tokenizer.convert_ids_to_tokens(outside[0])} (id {outside[0]}), and "
            f"the target's embedding has {size:,} rows: {ITS_TOKENIZER}"
        )


def check_room(recipe: Recipe, tokenizer: Any, conversations: Iterable[Conversation], limits: TargetLimits) -> None:
    """Check on a random sample that not all first prompts leave too little room for an answer.

    Prompt and `data.distill.max_new_tokens` together must be within the target's positions, and the prompt alone within
    `data.max_length_tokens`. Prompts that the template refuses are left out.

    Raises:
        UserError: No prompt leaves room for an answer.
    """
    new, most, positions = recipe.data.distill.max_new_tokens, recipe.data.max_length_tokens, limits.positions
    found, lengths = list(conversations), list[int]()
    for conversation in random.Random(recipe.seed).sample(found, min(SAMPLE_PROMPTS, len(found))):
        first = next(number for number, turn in enumerate(conversation.turns, start=1) if turn.role == "user")
        with suppress(TemplateProblem):
            length = len(prompt_token_ids(tokenizer, conversation.turns[:first], conversation.tools))
            if length < most and (positions is None or length + new <= positions):
                return
            lengths.append(length)
    if not lengths:
        return
    longest, within, fitting = max(lengths), f"data.max_length_tokens={most}", 0
    if positions is not None:
        within = f"the target's {positions:,} positions, or the prompt within {within}"
        fitting = positions - longest if longest < most else 0
    lower = f"set data.distill.max_new_tokens to {fitting} at most" if fitting > 0 else "lower that key"
    raise UserError(
        f"none of {len(lengths)} prompts leaves room for an answer of data.distill.max_new_tokens={new} within {within}"
        f"; the longest has {longest:,} tokens: {lower}, or use shorter conversations"
    )


def check_tokens(tokens: datasets.Dataset, limits: TargetLimits, folder: Path) -> None:
    """Check that the token ids and lengths of the token dataset in a folder are within the target's limits.

    Raises:
        UserError: A token id is beyond the embedding, or a row is too long.
    """
    ids = (pyarrow.compute.min_max(chunk.flatten()) for chunk in tokens.data.column("input_ids").chunks if len(chunk))
    bounds = [each.as_py() for each in ids]
    lowest, highest = min(each["min"] for each in bounds), max(each["max"] for each in bounds)
    size, longest = limits.vocabulary_size, max(row_lengths(tokens))
    if lowest < 0:
        raise UserError(f"{folder} has the token id {lowest}, and no token has one below 0: {DISTIL_AGAIN}")
    if size is not None and highest >= size:
        raise UserError(
            f"{folder} has the token id {highest}, and the target's embedding has {size:,} rows: {ITS_TOKENIZER}; then "
            + DISTIL_AGAIN
        )
    if refusal := limits.refusal(longest):
        raise UserError(f"{folder} has a row of {longest:,} tokens, but {refusal} and run `draftsmith distill` again")


def check_conversations(
    recipe: Recipe,
    tokenizer: Any,
    conversations: dict[str, Conversation],
    limits: TargetLimits,
    sources: SourceCounts,
) -> None:
    """Check the conversations against the target's limits, before any request.

    With `skip_invalid`, those with tokens beyond the embedding are removed from `conversations`, and counted.

    Raises:
        UserError: A token is beyond the target's embedding, no prompt leaves room for an answer, rows may be longer
            than the target's RoPE allows, or the template does not write the thoughts of answers that are kept.
    """
    keeps_answers, length = recipe.data.distill.engine == "none", recipe.data.max_length_tokens
    if limits.rope_switch is not None and (refusal := limits.refusal(length)):
        raise UserError(f"data.max_length_tokens is {length}, but {refusal}")
    check_template_tokens(tokenizer, limits)
    for key, conversation in list(conversations.items()):
        if tokens := outside_tokens(tokenizer, conversation, limits, keeps_answers):
            if not recipe.data.conversations.skip_invalid:
                raise UserError(
                    f"conversation {key} holds {', '.join(tokens[:3])}, and the target's embedding has "
                    f"{limits.vocabulary_size:,} rows: {ITS_TOKENIZER}; or set data.conversations.skip_invalid=true to "
                    "leave such conversations out"
                )
            tally = sources.by_source[conversation.source]
            tally.invalid[OUTSIDE] += 1
            tally.kept -= 1
            del conversations[key]
    if not conversations:
        raise UserError(f"every conversation holds tokens beyond the target's embedding: {ITS_TOKENIZER}")
    is_checked = keeps_answers and not recipe.data.conversations.skip_invalid
    if is_checked and any(turn.reasoning_content for each in conversations.values() for turn in each.turns):
        thoughts_field(tokenizer, chosen_template(tokenizer))
    if not keeps_answers:
        check_room(recipe, tokenizer, conversations.values(), limits)
