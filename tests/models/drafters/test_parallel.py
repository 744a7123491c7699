"""The parallel drafter: its features, and another target than its own."""

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_parallel, tiny_target

from draftsmith.errors import UserError
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


def test_drafter_of_another_target_is_refused() -> None:
    drafter = tiny_parallel(tiny_target())
    with pytest.raises(UserError, match="made for a target with vocab_size 61"):
        drafter.attach(tiny_target(vocab_size=70))
