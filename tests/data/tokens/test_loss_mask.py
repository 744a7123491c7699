"""Thoughts are taken out of the loss, token by token."""

import pytest

from draftsmith.data.tokens.loss_mask import TokenizedConversation


@pytest.mark.parametrize(
    ("ids", "loss", "kept"),
    [  # 8 opens thoughts, 9 ends them, 2 ends an answer
        ([1, 8, 5, 9, 6, 2], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]),
        ([1, 8, 3, 5, 9, 6, 2], [0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]),  # the prompt opens thoughts
        ([1, 8, 5, 5], [0, 1, 1, 1], [0, 0, 0, 0]),  # cut
        ([1, 8, 9, 6, 2], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]),  # the prompt opens no thoughts
        ([8, 1, 1, 1, 6, 2], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]),  # the user mentions the tag
        ([1, 8, 5, 9, 6, 2, 1, 7, 8, 5, 9, 2], [0, *[1] * 5, 0, *[1] * 5], [0] * 4 + [1, 1, 0, 1, 0, 0, 0, 1]),
    ],
)
def test_thoughts_carry_no_loss(ids: list[int], loss: list[int], kept: list[int]) -> None:
    masked = TokenizedConversation(ids, loss).without_reasoning(8, 9)
    assert (masked.input_ids, masked.loss_mask) == (ids, kept)
