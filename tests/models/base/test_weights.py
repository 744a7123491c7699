"""Loss weights of depths and rows, by hand."""

import math

import pytest
import torch
from support.tiny_models import tiny_drafter_of, tiny_target

from draftsmith.errors import UserError
from draftsmith.models.base.drafter import group_lengths
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.features import target_features


def test_shares_by_hand() -> None:
    """One number d is d**0, d**1, ...; the shares add up to 1."""
    for weights, expected in ((0.5, [4 / 7, 2 / 7, 1 / 7]), ([3.0, 1.0, 4.0], [3 / 8, 1 / 8, 1 / 2])):
        drafter = load_drafter_class("parallel").from_target(tiny_target(), {"depth_weights": weights, "num_masks": 2})
        assert drafter.config.options.depth_shares == pytest.approx(expected, abs=1e-15)


# ---- D-PACE: q = 0.5, 0.25, 0.5 smoothed with alpha = 0.5 are 0.75, 0.625, 0.75; their products 0.75, 0.46875,
# 0.3515625, and the sums of these from each depth on are below ----

CONFIDENCES = torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64)
BY_HAND = [1.5703125, 0.8203125, 0.3515625]


def test_dpace_at_its_extremes() -> None:
    """Fully confident or fully smoothed: G, G-1, ...; a label outside the draft vocabulary counts alpha."""
    nats = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([5.0, 1.0, 9.0]), torch.tensor([0.0, math.inf, 0.0])
    cases = zip((0.2, 1.0, 0.25), nats, ([3, 2, 1], [3, 2, 1], [1.5, 0.5, 0.25]), strict=True)
    for alpha, nats_n, expected in cases:
        assert group_lengths(alpha, nats_n, torch.arange(3), 1, 3)[0].tolist() == expected


def test_dpace_of_dropped_masks_is_unbiased() -> None:
    """Masks are kept at 3/5 and 2/5 of the groups: of five, two have one row, one has two, and two have all."""
    mean_g = torch.zeros(3, dtype=torch.float64)
    for rows, groups in ((1, 2), (2, 1), (3, 2)):
        nats_n = -CONFIDENCES[:rows].log()
        mean_g += groups / 5 * group_lengths(0.5, nats_n, torch.arange(rows), 1, 3, [1.0, 0.6, 0.4])[0]
    torch.testing.assert_close(mean_g, torch.tensor(BY_HAND, dtype=torch.float64), atol=1e-12, rtol=0)


def test_dropped_masks_keep_the_loss_of_dpace() -> None:
    """The loss of 3,990 groups, of which a fifth keeps all four rows, is that of all rows but for chance."""
    target = tiny_target()
    drafter = tiny_drafter_of("parallel", target, num_masks=3, keep_ratio=0.6, dpace_alpha=0.5)
    drafter.generator = torch.Generator().manual_seed(0)
    ids = torch.arange(4000).remainder(50).add(3).view(10, 400)
    with torch.no_grad():
        features = target_features(target, ids)
        batch = ids, features, torch.ones_like(ids)
        expected, dropped = drafter.eval()(*batch).loss, drafter.train()(*batch).loss
    assert float(dropped) == pytest.approx(float(expected), rel=0.05)


def test_invalid_alpha_is_reported() -> None:
    with pytest.raises(UserError, match="dpace_alpha`: input should be greater than 0, not 0"):
        load_drafter_class("medusa").from_target(tiny_target(), {"dpace_alpha": 0})
