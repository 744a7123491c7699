"""How much each depth counts, and when: by hand."""

import pytest
import torch
from support.tiny_models import tiny_target

from draftsmith.models.base.depth_weights import depth_shares
from draftsmith.models.base.registry import drafter_kinds, load_drafter_class
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
