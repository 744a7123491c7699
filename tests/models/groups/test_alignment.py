"""Labels and features of groups, derived by hand."""

import torch

from draftsmith.models.groups.alignment import depth_labels


def test_labels_never_leave_the_turn() -> None:
    """Derived by hand: x = 10..16, assistant tokens at 2, 3 and 5."""
    ids = torch.arange(10, 17).unsqueeze(0)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 0]])
    expected = [[-100, 12, 13, -100, 15, -100, -100], [-100, 13, -100, -100, -100, -100, -100], [-100] * 7]
    assert depth_labels(ids, mask, 3)[0].tolist() == expected
