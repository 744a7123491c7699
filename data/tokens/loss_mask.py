"""A row of token ids with its loss mask, and the removal of repeated tokens and of thoughts from the loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from draftsmith.errors import UserError
from draftsmith.recipes.schema import DataRecipe

COPIED_TOKENS = 12  # a run of this many tokens that occurred before in the answer is a copy
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

    def without_copies(self) -> "TokenizedConversation":
        """Return the row without loss on tokens that repeat earlier tokens of the same answer, see `copies_in`."""
        mask = list(self.loss_mask)
        for start, end in runs_of_ones(self.loss_mask):
            mask[start:end] = [int(not copy) for copy in copies_in(self.input_ids[start:end])]
        return replace(self, loss_mask=mask)

    def with_copies(self) -> "TokenizedConversation":
        """Undo `without_copies`: restore the loss on repeated tokens between two parts of an answer.

        Repeated tokens at the end of an answer cannot be recognised and stay without loss.
        """
        mask = list(self.loss_mask)
        places = [place for place, carries_loss in enumerate(mask) if carries_loss]
        begin = places[0] if places else 0
        for end, after in pairwise(places):
            if after == end + 1:
                continue
            if all(copies_in(self.input_ids[begin : after + COPIED_TOKENS])[end + 1 - begin : after - begin]):
                mask[end + 1 : after] = [1] * (after - end - 1)
            else:
                begin = after
        return replace(self, loss_mask=mask)

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


def copies_in(answer: list[int]) -> list[bool]:
    """Return for each token whether it is in a copy: a run of `COPIED_TOKENS` tokens that the answer had before.

    The two runs may overlap: in a short loop all but the first pass is a copy.
    """
    copied = [False] * len(answer)
    seen: set[tuple[int, ...]] = set()
    for start in range(len(answer) - COPIED_TOKENS + 1):
        run = tuple(answer[start : start + COPIED_TOKENS])
        if run in seen:
            copied[start : start + COPIED_TOKENS] = [True] * COPIED_TOKENS
        seen.add(run)
    return copied


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
