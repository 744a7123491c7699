"""Medusa: its heads start as the target's, its loss is the paper's, and any architecture works."""

from typing import Any

import pytest
import torch
from support.tiny_models import LENGTH, VOCABULARY, random_batch, tiny_target

from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.features import target_features


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
