"""Loss weights of depths, by hand."""

import pytest
from support.tiny_models import tiny_target

from draftsmith.models.base.registry import load_drafter_class


def test_shares_by_hand() -> None:
    """One number d is d**0, d**1, ...; the shares add up to 1."""
    for weights, expected in ((0.5, [4 / 7, 2 / 7, 1 / 7]), ([3.0, 1.0, 4.0], [3 / 8, 1 / 8, 1 / 2])):
        drafter = load_drafter_class("parallel").from_target(tiny_target(), {"depth_weights": weights, "num_masks": 2})
        assert drafter.config.options.depth_shares == pytest.approx(expected, abs=1e-15)
