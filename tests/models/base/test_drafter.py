"""Behaviour that every kind of drafter inherits, tested on a minimal kind."""

import pytest
import torch
from pydantic import Field
from support.tiny_models import VOCABULARY, tiny_target
from transformers import PreTrainedModel

from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.options import Loss
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.models.groups.layout import previous_features
from draftsmith.models.target.features import required_layers


class InnerConfig(DrafterConfig):
    model_type = "draftsmith_inner"

    class Options(MedusaConfig.Options):
        """Options of a kind that reads another layer by `feature_layers`, as in CONTRIBUTING.md."""

        feature_layers: list[int] = Field([1])
        loss: Loss = "kl"


class InnerDrafter(MedusaDrafter):
    config_class = InnerConfig


def inner_drafter(target: PreTrainedModel, loss: str) -> InnerDrafter:
    return InnerDrafter.from_target(target, {"num_heads": 1, "lm_heads": "shared", "loss": loss})


def test_teacher_is_the_target_also_if_features_are_of_an_inner_layer() -> None:
    """The loss is the KL to softmax(W h) of the final hidden states; the drafter reads those after layer 1."""
    target = tiny_target()
    drafter = inner_drafter(target, "kl")
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    features, teacher_features = drafter.training_features(target, ids)
    outputs = target(ids, output_hidden_states=True)
    torch.testing.assert_close(features, outputs.hidden_states[1])
    # Depth 1 of group t is x_{t+1}; untrained blocks add nothing, so q is softmax(W h_{t-1}).
    log_q = target.lm_head(previous_features(features)[:, :-1]).log_softmax(-1)
    log_p = outputs.logits[:, :-1].log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    loss = drafter(ids, features, torch.ones_like(ids), teacher_features=teacher_features).loss
    torch.testing.assert_close(loss, expected)
    with pytest.raises(ValueError, match="the loss needs the target's final features: pass `teacher_features`"):
        drafter(ids, features, torch.ones_like(ids))


def test_loss_of_labels_needs_no_further_layer() -> None:
    target = tiny_target()
    drafter = inner_drafter(target, "ce")
    assert required_layers(drafter) == (1,)
    assert drafter.training_features(target, torch.tensor([[3, 4, 5]]))[1] is None


def test_shares_by_hand() -> None:
    """The weights are d**0, d**1, ...; the shares add up to 1."""
    drafter = load_drafter_class("parallel").from_target(tiny_target(), {"depth_weights": 0.5, "num_masks": 2})
    assert drafter.config.options.depth_shares == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=1e-15)
