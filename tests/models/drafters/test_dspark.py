"""DSpark's additions to a block: logits that depend on the previous token, and a confidence head for alpha."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.drafter_cases import group_hidden
from support.tiny_models import LENGTH, random_batch, tiny_drafter_of, tiny_target

from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.drafters.dflash import DFlashDrafter

TARGET = tiny_target(num_hidden_layers=4)


def tiny_dspark(**options: Any) -> DFlashDrafter:
    drafter = tiny_drafter_of("dspark", TARGET, **{"block_size": 3, "markov_rank": 5, **options})
    assert isinstance(drafter, DFlashDrafter)
    return drafter


@pytest.mark.parametrize("loss", ["kl", "tv", "ce"])
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_loss_by_hand(loss: str, weight: float) -> None:
    """Row losses plus cross entropies between c and alpha = sum min(p, q): a weighted sum of the depths' means."""
    drafter = tiny_dspark(loss=loss, depth_weights=[3.0, 2.0, 1.0], confidence_weight=weight)
    batch = random_batch(TARGET, drafter=drafter)
    ids, mask, features = batch["input_ids"], batch["loss_mask"], batch["features"]
    state = drafter.state_dict()
    with torch.no_grad():
        output, logits = drafter(**batch), drafter.group_logits(ids, features)
        normed = drafter.norm(group_hidden(drafter, ids, features))
        teacher = TARGET(ids).logits
    losses: list[list[float]] = [[], [], []]
    for b, j, t in itertools.product(range(2), range(3), range(1, LENGTH)):
        if t + 1 + j >= LENGTH or not mask[b, t + 1 : t + 2 + j].all():
            continue
        log_q, log_p = logits[b, j, t].log_softmax(-1), teacher[b, t + j].log_softmax(-1)
        alpha = torch.minimum(log_p.exp(), log_q.exp()).sum()
        row = {"kl": (log_p.exp() * (log_p - log_q)).sum(), "tv": 1 - alpha, "ce": -log_q[ids[b, t + 1 + j]]}[loss]
        read = torch.cat([normed[b, j, t], state["markov_head.markov_w1.weight"][ids[b, t + j]]])
        said = read @ state["confidence_head.proj.weight"][0] + state["confidence_head.proj.bias"][0]
        sure = -(alpha * F.logsigmoid(said) + (1 - alpha) * F.logsigmoid(-said))
        losses[j].append(float(row + weight * sure))
    means = torch.tensor([sum(of_depth) / len(of_depth) for of_depth in losses])
    torch.testing.assert_close(output.loss, (means * torch.tensor([3.0, 2.0, 1.0])).sum() / 6, atol=1e-5, rtol=1e-5)


def test_dpace_weights_apply_to_the_confidence_loss() -> None:
    """With fixed row weights, doubling the confidence loss doubles its share."""
    losses = []
    for weight in (0.0, 1.0, 2.0):
        drafter = tiny_dspark(loss="ce", confidence_weight=weight, dpace_alpha=0.3)
        state = tiny_dspark(loss="ce", dpace_alpha=0.3).state_dict()
        drafter.load_state_dict({name: state[name] for name in drafter.state_dict()})
        losses.append(drafter(**random_batch(TARGET, drafter=drafter)).loss.item())
    assert losses[2] - losses[1] == pytest.approx(losses[1] - losses[0], rel=1e-4)
    assert losses[1] > losses[0] + 0.1


@pytest.mark.parametrize("dpace_alpha", [None, 0.5])
def test_labels_outside_the_draft_vocabulary_have_no_loss(dpace_alpha: float | None) -> None:
    """Without a teacher, neither head reads their rows: tokens 40 to 59 are labels, tokens 0 to 39 are drafted."""
    drafter = tiny_dspark(loss="ce", draft_vocab_size=40, dpace_alpha=dpace_alpha)
    ids = torch.arange(40, 60).view(1, 20)
    features, teacher = drafter.training_features(TARGET, ids)
    assert drafter(ids, features, torch.ones_like(ids), teacher_features=teacher).loss == 0.0


def test_confidence_weight_0_needs_no_head_and_no_teacher() -> None:
    drafter = tiny_dspark(loss="ce", confidence_weight=0.0)
    assert not any(name.startswith("confidence") for name in drafter.state_dict())
    assert not drafter.needs_teacher
    assert tiny_dspark(loss="ce").needs_teacher


def test_confidence_and_markov_head_start_at_zero() -> None:
    drafter = load_drafter_class("dspark").from_target(TARGET, {"markov_rank": 5})
    state = drafter.state_dict()
    assert not state["confidence_head.proj.weight"].any()
    assert not state["confidence_head.proj.bias"].any()
    assert not state["markov_head.markov_w2.weight"].any()
