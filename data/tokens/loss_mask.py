"""A row of token ids with its loss mask, and the removal of thoughts from the loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from draftsmith.errors import UserError
from draftsmith.recipes.schema import DataRecipe

OPENED_WITHIN_TOKENS = 2  # a prompt that ends with "<think>\n" makes the answer begin with thoughts


@dataclass(frozen=True)
class TokenizedConversation:
    """Token ids of a training row, a tokenised conversation or a part of one, with its loss mask.

    loss_mask: 1 at tokens of assistant turns that are learned, their end tokens included, otherwise 0.
    """

    input_ids: list[int]
    loss_mask: list[int]

    def answers(self) -> list[list[int]]:
        """Return the token ids of each assistant turn that carries loss, which is a run of ones in the mask."""
        return [self.input_ids[start:end] for start, end in runs_of_ones(self.loss_mask)]

    def without_reasoning(self, opening: int, closing: int) -> "TokenizedConversation":
        """Return the row without loss on thoughts, and on the tokens that start and end them.

        Args:
            opening: Id of the token that starts thoughts, in an answer or at the end of its prompt.
            closing: Id of the token that ends thoughts. Without it they reach to the end of their answer.
        """
        mask = list(self.loss_mask)
        for start, end in runs_of_ones(self.loss_mask):
            before = self.input_ids[max(0, start - OPENED_WITHIN_TOKENS) : start]
            thinks = opening in before and closing not in before
            for place in range(start, end):
                token_id = self.input_ids[place]
                thinks = thinks or token_id == opening
                mask[place] = int(not thinks)
                thinks = thinks and token_id != closing
        return replace(self, loss_mask=mask)


def runs_of_ones(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, end) of each run of ones in a mask; `end` is exclusive."""
    runs, end = [], 0
    for is_one, run in groupby(mask):
        start, end = end, end + len(list(run))
        runs += [(start, end)] if is_one else []
    return runs


def reasoning_ids(tokenizer: Any, data: DataRecipe) -> tuple[int, int] | None:
    """Return the ids of the tokens that start and end thoughts; None if thoughts are learned (`data.reasoning`).

    Raises:
        UserError: One of `data.reasoning_tokens` is not in the target's vocabulary.
    """
    if data.reasoning == "learn":
        return None
    opening, closing = (tokenizer.get_vocab().get(token) for token in data.reasoning_tokens)
    if opening is None or closing is None:
        missing = data.reasoning_tokens[opening is not None]
        raise UserError(
            f"the target's tokenizer has no token {missing}, so that its reasoning cannot be separated from the "
            "answers: set data.reasoning_tokens to the tokens that start and end its reasoning, or "
            "data.reasoning=learn if it has none"
        )
    return opening, closing
