"""ParallelSpec's EAGLE flavour: the sum of EAGLE losses over a group, and masks that are pairs."""

import pytest
import torch
from support.eagle_reference import eagle_features, kl, pairs, smooth_l1
from support.tiny_models import LENGTH, random_batch, tiny_drafter_of, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter

MASKS = 3


def group_by_recomputation(drafter: Drafter, target: PreTrainedModel, ids: Tensor, features: Tensor, t: int) -> Tensor:
    """[K+1, D] predicted features of group t: a causal forward over the tokens up to x_t and then the masks."""
    previous = torch.cat([torch.zeros_like(features[:1]), features[:t]])
    masks = drafter.masks @ drafter.fc.weight.T
    inputs = torch.cat([pairs(drafter, target, ids[: t + 1].tolist(), previous), masks])
    causal = [list(range(row + 1)) for row in range(len(inputs))]
    return eagle_features(drafter, inputs, list(range(len(inputs))), causal)[t:]


@pytest.mark.parametrize(
    ("loss", "class_weight", "depth_weights", "shares"),
    [
        ("kl", 0.3, 1.0, [0.25] * 4),
        ("kl", 0.3, [4, 2, 1, 1], [0.5, 0.25, 0.125, 0.125]),
        ("ce", 1.0, 1.0, [0.25] * 4),  # the paper's
    ],
)
def test_the_loss_is_the_sum_of_eagles_over_the_group(
    loss: str, class_weight: float, depth_weights: float | list[float], shares: list[float]
) -> None:
    """[MASK]_j of group t: SmoothL1 to h_{t+j}, KL to the distribution after it; each depth over its own labels.

    With `ce`, in KL's place, cross entropy with x_{t+1+j} itself.
    """
    target = tiny_target().double()
    drafter = tiny_drafter_of(
        "eagle_parallel", target, num_masks=MASKS, loss=loss, class_weight=class_weight, depth_weights=depth_weights
    )
    batch = random_batch(target, drafter=drafter)
    output = drafter(**batch)
    output.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    head = target.get_output_embeddings().weight
    losses: list[list[Tensor]] = [[] for _ in range(MASKS + 1)]
    for ids, features, mask in zip(batch["input_ids"], batch["features"], batch["loss_mask"], strict=True):
        for t in range(LENGTH - 1):
            predicted = group_by_recomputation(drafter, target, ids, features, t)
            for j in range(MASKS + 1):
                if t + 1 + j >= LENGTH or not mask[t + 1 : t + 2 + j].all():
                    break
                logits = head @ predicted[j]
                distance = kl(head @ features[t + j], logits)
                if loss == "ce":
                    distance = -logits.log_softmax(-1)[ids[t + 1 + j]]
                losses[j].append(smooth_l1(predicted[j], features[t + j]) + class_weight * distance)
    assert output.depth_count.tolist() == [len(of_depth) for of_depth in losses]
    means = torch.stack([torch.stack(of_depth).mean() for of_depth in losses])
    expected = (means * torch.tensor(shares)).sum()
    expected.backward()
    # transformers' RoPE is in fp32.
    torch.testing.assert_close(output.loss, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        gradients, {name: p.grad for name, p in drafter.named_parameters()}, atol=1e-5, rtol=1e-5
    )


def test_without_masks_it_is_eagle() -> None:
    target = tiny_target()
    eagle = tiny_drafter_of("eagle", target)
    parallel = tiny_drafter_of("eagle_parallel", target, num_masks=0)
    parallel.load_state_dict({**eagle.state_dict(), "masks": torch.empty(0, 64)})
    batch = random_batch(target, drafter=eagle)
    assert parallel(**batch).loss == eagle(**batch).loss
    decoder, tree_decoder = parallel.decoder(LENGTH), eagle.decoder(LENGTH)
    for each in (decoder, tree_decoder):
        each.start(batch["input_ids"][0], batch["features"][0])
    assert torch.equal(decoder.draft(), tree_decoder.begin())
