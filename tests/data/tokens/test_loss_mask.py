"""Copies and thoughts are taken out of the loss, token by token."""

import pytest

from draftsmith.data.tokens.loss_mask import TokenizedConversation, copies_in


@pytest.mark.parametrize(
    ("answer", "copied"),
    [
        ([*range(12), *range(12)], [0] * 12 + [1] * 12),
        ([*range(11), 50, *range(11), 51], [0] * 24),  # eleven in a row are too few for a copy
        ([*range(14), 50, *range(14), 51], [0] * 15 + [1] * 14 + [0]),  # new words after it are no copy
        ([7] * 13, [0] + [1] * 12),
        ([7] * 12, [0] * 12),
        ([3, 7, 8] + [7, 8] * 6 + [9], [0] * 3 + [1] * 12 + [0]),  # the first repetition of a loop
        ([], []),
    ],
)
def test_copies_are_found(answer: list[int], copied: list[int]) -> None:
    assert list(map(int, copies_in(answer))) == copied


def test_copies_are_searched_within_one_answer() -> None:
    said = list(range(5, 17))
    tokens = TokenizedConversation([1, *said, 2, 3, *said, *said, 2], [0] + [1] * 13 + [0] + [1] * 25)
    assert tokens.without_copies().loss_mask == [0] + [1] * 13 + [0] + [1] * 12 + [0] * 12 + [1]
    assert tokens.without_copies().input_ids == tokens.input_ids
    assert tokens.without_copies().with_copies() == tokens


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
