"""ParallelSpec's EAGLE flavour: the masks of a group are pairs of an embedding and a feature."""

import itertools

import torch
from support.eagle_reference import eagle_features, pairs
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


def test_groups_are_the_papers() -> None:
    """`[MASK]_j` of group t is one more pair behind the tokens up to x_t, in plain causal order."""
    target = tiny_target().double()
    drafter = tiny_drafter_of("eagle_parallel", target, num_masks=MASKS)
    batch = random_batch(target, drafter=drafter)
    with torch.no_grad():
        hidden = drafter.group_hidden(batch["input_ids"], batch["features"])
        for b, t in itertools.product(range(2), range(LENGTH)):
            expected = group_by_recomputation(drafter, target, batch["input_ids"][b], batch["features"][b], t)
            # transformers' RoPE is in fp32.
            torch.testing.assert_close(hidden[b, :, t], expected, atol=1e-6, rtol=1e-6)
