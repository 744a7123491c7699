"""A row of token ids with its loss mask."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


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


def runs_of_ones(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, end) of each run of ones in a mask; `end` is exclusive."""
    runs, end = [], 0
    for is_one, run in groupby(mask):
        start, end = end, end + len(list(run))
        runs += [(start, end)] if is_one else []
    return runs
