"""Medusa: its heads start as the target's, its loss is the paper's, and any architecture works."""

from typing import Any

import pytest
import torch
from support.tiny_models import LENGTH, VOCABULARY, random_batch, tiny_drafter_of, tiny_target
from transformers import PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.models.drafters.medusa import MedusaDrafter
from draftsmith.models.target.features import target_features

HIDDEN = 32


def tiny_medusa(target: PreTrainedModel, **options: Any) -> MedusaDrafter:
    drafter = tiny_drafter_of("medusa", target, **{"num_heads": 3, **options})
    assert isinstance(drafter, MedusaDrafter)
    return drafter


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("lm_heads", ["separate", "shared"])
def test_every_head_starts_as_the_targets(model_type: str, lm_heads: str) -> None:
    """Initially every head of group t gives the logits that predicted x_t."""
    target = tiny_target(model_type)
    drafter = MedusaDrafter.from_target(target, {"num_heads": 3, "num_layers": 2, "lm_heads": lm_heads})
    ids = random_batch(target)["input_ids"]
    with torch.no_grad():
        logits = drafter.group_logits(ids, target_features(target, ids))
        own = target(ids).logits
    assert logits.shape == (2, 3, LENGTH, VOCABULARY)
    for j in range(3):
        assert torch.equal(logits[:, j, 1:], own[:, :-1])


def test_first_token_has_no_previous_feature() -> None:
    """A prompt of one token is drafted from zeros, as group 0 in training."""
    target = tiny_target()
    drafter = tiny_medusa(target)
    batch = random_batch(target, 1)
    ids, features = batch["input_ids"], batch["features"]
    decoder = drafter.decoder(LENGTH)
    with pytest.raises(ValueError, match="call start"):
        decoder.draft()
    decoder.start(ids[0, :1], features[0, :1])
    with torch.no_grad():
        expected = drafter.group_logits(ids, torch.zeros_like(features))[0, :, 0]
    torch.testing.assert_close(decoder.draft(), expected)


def test_lm_head_with_a_bias_can_only_be_shared() -> None:
    target = tiny_target("phi", partial_rotary_factor=1.0)
    assert target.lm_head.bias is not None
    with pytest.raises(UserError, match=r"has a bias.*drafter.options.lm_heads=shared"):
        MedusaDrafter.from_target(target, {})
    drafter = MedusaDrafter.from_target(target, {"lm_heads": "shared"})
    ids = random_batch(target)["input_ids"]
    with torch.no_grad():
        target.lm_head.bias += torch.arange(VOCABULARY)
        logits = drafter.group_logits(ids, target_features(target, ids))
        assert torch.equal(logits[:, 4, 1:], target(ids).logits[:, :-1])
