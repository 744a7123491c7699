"""The parallel drafter: its features, and another target than its own."""

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_parallel, tiny_target

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.features import target_features


def test_every_feature_layer_is_normalised_separately() -> None:
    """Scaling one residual stream by a hundred changes nothing."""
    target = tiny_target()
    drafter = tiny_parallel(target, feature_layers=[0, 1, -1])
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    features = target_features(target, ids, layers=drafter.feature_layers)
    assert features.shape[-1] == 3 * target.config.hidden_size
    louder = features.unflatten(-1, (3, -1)) * torch.tensor([100.0, 1.0, 3.0])[:, None]
    logits, same = (drafter.group_logits(ids, f) for f in (features, louder.flatten(-2)))
    torch.testing.assert_close(same, logits, atol=1e-4, rtol=0)
    swapped = features.unflatten(-1, (3, -1))[..., [1, 0, 2], :].flatten(-2)
    assert (drafter.group_logits(ids, swapped) - logits).abs().max() > 1e-2


@pytest.mark.parametrize("model_type", ["qwen2", "phi3"])
def test_a_narrow_mlp_keeps_the_neurons_with_the_largest_output_weights(model_type: str) -> None:
    """The others do nothing here, so that the narrow layer computes the same."""
    target = tiny_target(model_type)
    mlp = target.base_model.layers[-1].mlp
    mlp.down_proj.weight.data[:, ::2] = 0.0
    half = mlp.down_proj.in_features // 2
    parallel = load_drafter_class("parallel")
    wide, narrow = (parallel.from_target(target, {"intermediate_size": width}) for width in (None, half))
    hidden = torch.randn(5, target.config.hidden_size)
    torch.testing.assert_close(narrow.layers[0].mlp(hidden), wide.layers[0].mlp(hidden))
    assert narrow.layers[0].mlp.down_proj.in_features == half


def test_drafter_of_another_target_is_refused() -> None:
    drafter = tiny_parallel(tiny_target())
    with pytest.raises(UserError, match="made for a target with vocab_size 61"):
        drafter.attach(tiny_target(vocab_size=70))
