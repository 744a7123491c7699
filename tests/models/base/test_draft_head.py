"""From the losses of rows to that of a step: how much each depth and each row counts, by hand."""

import math

import pytest
import torch
from support.row_losses import loss_of_rows
from support.tiny_models import tiny_target
from torch import nn

from draftsmith.models.base.draft_head import depth_shares, dpace_weights
from draftsmith.models.base.registry import drafter_kinds, load_drafter_class
from draftsmith.models.losses import LowRankLogits
from draftsmith.recipes.errors import UserError


@pytest.mark.parametrize(
    ("progress_frac", "expected"),
    [
        (0.0, [1.0, 0.0, 0.0]),
        (0.1, [16 / 21, 4 / 21, 1 / 21]),  # half of the ramp: 1, 0.5 * 0.5, 0.25 * 0.25
        (0.2, [4 / 7, 2 / 7, 1 / 7]),
        (1.0, [4 / 7, 2 / 7, 1 / 7]),
    ],
)
def test_a_ramp_by_hand(progress_frac: float, expected: list[float]) -> None:
    """lambda = 0.5**j over the first fifth of the training."""
    assert depth_shares([1.0, 0.5, 0.25], 0.2, progress_frac) == pytest.approx(expected, abs=1e-15)


def test_without_a_ramp_nothing_depends_on_progress() -> None:
    assert depth_shares([3.0, 1.0], 0.0, 0.0) == depth_shares([3.0, 1.0], 0.0, 0.7) == [0.75, 0.25]
    assert depth_shares([3.0, 1.0], 0.5, 0.25) == pytest.approx([6 / 7, 1 / 7])


@pytest.mark.parametrize("kind", drafter_kinds())
def test_every_kind_with_depths_trains_by_the_ramp(kind: str) -> None:
    """At the first step the loss is depth 1's alone; a trained drafter's is the recipe's, in eval mode too."""
    options = load_drafter_class(kind).config_class.Options.model_fields
    if "depth_ramp" not in options:
        assert "depth_weights" not in options
        return
    target = tiny_target(num_hidden_layers=4)

    def loss(training: bool, progress_frac: float, **given: object) -> float:
        torch.manual_seed(0)
        drafter = load_drafter_class(kind).from_target(target, {**given, **quiet}).train(training)
        drafter.training_progress_frac = progress_frac
        ids = torch.arange(3, 19)[None]
        features = torch.cat([target.get_input_embeddings()(ids)] * len(drafter.feature_layers), dim=-1)
        teacher = features[..., -target.config.hidden_size :]
        mask = torch.ones_like(ids)
        with torch.no_grad():
            return float(drafter(ids, features, mask, teacher_features=teacher).loss)

    quiet: dict[str, object] = {"feature_noise": 0.0} if "feature_noise" in options else {}
    first_alone = {"depth_weights": 1e-30}
    assert loss(True, 0.0, depth_ramp=0.5) == pytest.approx(loss(True, 1.0, **first_alone), rel=1e-6)
    halfway = {"depth_weights": 0.4}  # 0.8 * 0.25 / 0.5
    assert loss(True, 0.25, depth_weights=0.8, depth_ramp=0.5) == pytest.approx(loss(True, 1.0, **halfway), rel=1e-6)
    assert loss(False, 0.0, depth_weights=0.8, depth_ramp=0.5) == loss(False, 1.0, depth_weights=0.8)


def test_a_wrong_ramp_is_named() -> None:
    target = tiny_target(num_hidden_layers=4)
    with pytest.raises(UserError, match=r"key `drafter\.options\.depth_ramp`: .*less than or equal to 1, not 2"):
        load_drafter_class("parallel").from_target(target, {"depth_ramp": 2})


# ---- D-PACE: q = 0.5, 0.25, 0.5 smoothed with alpha = 0.5 are 0.75, 0.625, 0.75; their products 0.75, 0.46875,
# 0.3515625, and what is left of these from each depth on is below ----

CONFIDENCES = torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64)
BY_HAND = [1.5703125, 0.8203125, 0.3515625]


def test_dpace_by_hand() -> None:
    """A whole group, one cut after two depths, one of a single depth, and rows in any order."""
    group_n, depth_n = torch.tensor([4, 0, 4, 2, 0, 4]), torch.tensor([2, 0, 0, 0, 1, 1])
    weights_n = dpace_weights(0.5, -CONFIDENCES[depth_n].log(), group_n, depth_n, 5, 3)
    assert weights_n.tolist() == pytest.approx([BY_HAND[2], 1.21875, BY_HAND[0], 0.75, 0.46875, BY_HAND[1]], abs=1e-12)


def test_dpaces_extremes() -> None:
    """Sure of everything, or smoothed away: G, G-1, ...; a label that cannot be drafted passes alpha on."""
    group_n, depth_n = torch.zeros(3, dtype=torch.long), torch.arange(3)
    nats = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([5.0, 1.0, 9.0]), torch.tensor([0.0, math.inf, 0.0])
    cases = zip((0.2, 1.0, 0.25), nats, ([3, 2, 1], [3, 2, 1], [1.5, 0.5, 0.25]), strict=True)
    for alpha, nats_n, expected in cases:
        assert dpace_weights(alpha, nats_n, group_n, depth_n, 1, 3).tolist() == expected


def test_dpace_has_no_ramp() -> None:
    with pytest.raises(UserError, match="`dpace_alpha` lets deeper depths in by itself: leave `depth_ramp` at 0"):
        load_drafter_class("parallel").from_target(tiny_target(), {"dpace_alpha": 0.5, "depth_ramp": 0.3})
    with pytest.raises(UserError, match="dpace_alpha`: input should be greater than 0, not 0"):
        load_drafter_class("medusa").from_target(tiny_target(), {"dpace_alpha": 0})


# ---- the loss of rows ----


@pytest.mark.parametrize("name", ["ce", "kl"])
def test_means_of_depths(name: str) -> None:
    """Means per depth, then weights; depth 2 of 4 has no rows. A label outside has no `ce`, but is counted."""
    generator = torch.Generator().manual_seed(1)
    hidden, teacher = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64).unbind()
    head, teacher_head = (nn.Linear(5, 11, bias=False).double() for _ in range(2))
    shares, depth_n = [0.4, 0.3, 0.2, 0.1], torch.tensor([0, 3, 1, 0, 0, 3, 1])
    labels_n = torch.tensor([5, -100, 3, 9, 0, 1, 4])
    result = loss_of_rows(hidden, depth_n, labels_n, head, shares, name, teacher, teacher_head)
    assert result.depth_count is not None
    assert result.depth_count.tolist() == [3, 2, 0, 2]
    log_q, known_n = head(hidden).log_softmax(-1), labels_n >= 0
    nats_n = -log_q.gather(1, labels_n.clamp_min(0)[:, None])[:, 0]
    p = teacher_head(teacher).softmax(-1)
    losses_n, read_n = (nats_n, known_n) if name == "ce" else ((p * (p.log() - log_q)).sum(-1), known_n | True)
    correct_n = (log_q.argmax(-1) == labels_n) & known_n
    expected = torch.zeros((), dtype=torch.float64)
    for depth, share in enumerate(shares):
        mine = (depth_n == depth) & read_n
        expected = expected + (share * losses_n[mine].mean() if mine.any() else 0.0)
        assert result.depth_loss_sum is not None
        assert result.depth_correct is not None
        torch.testing.assert_close(result.depth_loss_sum[depth], nats_n[(depth_n == depth) & known_n].sum().detach())
        assert result.depth_correct[depth] == correct_n[depth_n == depth].sum()
    torch.testing.assert_close(result.loss, expected)
    found, wanted = (torch.autograd.grad(loss, head.weight, retain_graph=True) for loss in (result.loss, expected))
    torch.testing.assert_close(found, wanted)


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.long)
    result = loss_of_rows(torch.zeros(0, 5), none, none, nn.Linear(5, 11, bias=False), [0.5, 0.5])
    sums = (result.depth_count, result.depth_loss_sum, result.depth_correct)
    assert [part.tolist() for part in sums if part is not None] == [[0, 0]] * 3
    assert result.loss is not None
    assert result.loss.item() == 0.0


def test_a_low_rank_term() -> None:
    """Two depths of two rows each, weights 3/4 and 1/4: a term that makes the labels certain leaves no loss."""
    head = nn.Linear(5, 13, bias=False).requires_grad_(False)
    head.weight.zero_()
    labels_n, depth_n = torch.tensor([2, 5, 7, 7]), torch.tensor([0, 0, 1, 1])
    nothing = torch.zeros(13, 4)
    certain = nothing.clone()
    certain[labels_n, torch.arange(4)] = 100.0
    half = certain.clone()
    half[:, 3] = 0.0  # half of the second depth knows nothing
    for columns_vr, share in ((nothing, 1.0), (certain, 0.0), (half, 0.125)):
        low_rank = LowRankLogits(torch.eye(4), columns_vr)
        output = loss_of_rows(torch.ones(4, 5), depth_n, labels_n, head, [0.75, 0.25], low_rank=low_rank)
        torch.testing.assert_close(output.loss, torch.tensor(share * math.log(13)))
