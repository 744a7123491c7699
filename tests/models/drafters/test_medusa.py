"""Medusa: its heads start as the target's, its loss is the paper's, and any architecture works."""

from typing import Any

import pytest
import torch
from support.tiny_models import LENGTH, VOCABULARY, random_batch, tiny_drafter_of, tiny_target

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.drafters.medusa import MedusaDrafter
from draftsmith.models.target.features import target_features

HIDDEN = 32


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize(("kind", "lm_heads"), [("medusa", "separate"), ("medusa", "shared"), ("hydra", "separate")])
def test_every_head_starts_as_the_targets(model_type: str, kind: str, lm_heads: str) -> None:
    """Initially every head of group t gives the logits that predicted x_t: those after h_{t-1}."""
    target = tiny_target(model_type)
    options = {"num_heads": 3, "num_layers": 2, "lm_heads": lm_heads}
    drafter: Any = load_drafter_class(kind).from_target(target, options)
    ids = random_batch(target)["input_ids"]
    with torch.no_grad():
        logits = drafter.group_logits(ids, target_features(target, ids))
        own = target(ids).logits
    assert logits.shape == (2, 3, LENGTH, VOCABULARY)
    for j in range(3):
        torch.testing.assert_close(logits[:, j, 1:], own[:, :-1])


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_draft_needs_an_observed_token(kind: str) -> None:
    """The last sequence's state is not left to the first draft of the next."""
    decoder: Any = tiny_drafter_of(kind, tiny_target()).decoder(LENGTH)
    for _ in range(2):
        decoder.start(torch.tensor([5, 9]), torch.randn(2, HIDDEN))
        with pytest.raises(ValueError, match=r"call observe\(\) first"):
            (decoder.begin if kind == "hydra" else decoder.draft)()
        decoder.observe(torch.tensor([7]), torch.randn(1, HIDDEN))


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
