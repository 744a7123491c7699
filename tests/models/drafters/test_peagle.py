"""P-EAGLE: its groups against whole sequences run row by row, its one shared mask, its tensors, its options."""

from typing import Any

import pytest
import torch
from support.eagle_reference import LayoutReference
from support.tiny_models import LENGTH, random_batch, tiny_drafter_of, tiny_target
from transformers import PreTrainedModel

from draftsmith.models.drafters.peagle import PEagleDrafter

MASKS, TARGET_LAYERS, MASK_ID = 3, 4, 55
# Everything is in fp64 but the norms and RoPE, which transformers computes in fp32.
TOLERANCE = 1e-6


def target_and_drafter(**options: Any) -> tuple[PreTrainedModel, PEagleDrafter]:
    """In fp64."""
    target = tiny_target(num_hidden_layers=TARGET_LAYERS).double()
    drafter = tiny_drafter_of("peagle", target, **{"num_masks": MASKS, "mask_token_id": MASK_ID, **options})
    assert isinstance(drafter, PEagleDrafter)
    return target, drafter


@pytest.mark.parametrize(
    "options", [{}, {"attention": "dense", "num_layers": 2}, {"fc_norm": True}, {"norm_before_fc": True}]
)
def test_groups_equal_whole_sequences(options: dict[str, Any]) -> None:
    """Group t is what vLLM runs: the true tokens up to x_t, then K rows of the mask token, in plain causal order."""
    target, drafter = target_and_drafter(**options)
    batch = random_batch(target, 1, drafter=drafter)
    ids, features = batch["input_ids"][0], batch["features"][0]
    with torch.no_grad():
        training = drafter.group_logits(batch["input_ids"], batch["features"])[0]
        reference, masks = LayoutReference.of(drafter), drafter.mask_hidden.expand(MASKS, -1)
        for t in range(LENGTH):
            g = reference.eagle3_fused(torch.cat([torch.zeros_like(features[:1]), features[:t], masks]))
            out = reference.eagle3_slots([*ids[: t + 1].tolist(), *[MASK_ID] * MASKS], g)
            expected = reference.eagle3_logits(out[t:])
            torch.testing.assert_close(training[:, t], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_mask_reaches_the_masks_only() -> None:
    target, drafter = target_and_drafter()
    batch = random_batch(target, drafter=drafter)
    with torch.no_grad():
        before = drafter.group_hidden(batch["input_ids"], batch["features"])
        drafter.config.mask_token_id = MASK_ID + 1
        other_token = drafter.group_hidden(batch["input_ids"], batch["features"])
        drafter.config.mask_token_id = MASK_ID
        drafter.mask_hidden += 1.0
        other_hidden = drafter.group_hidden(batch["input_ids"], batch["features"])
    for changed in (other_token, other_hidden):
        assert torch.equal(changed[:, 0], before[:, 0])
        assert (changed[:, 1:] != before[:, 1:]).any(-1).all()


@pytest.mark.parametrize(("pad", "expected"), [(0, 0), (17, 17), (None, 60), (-1, 60)])
def test_default_mask_token(pad: int | None, expected: int) -> None:
    """The padding token, or the last of the vocabulary of 61."""
    target = tiny_target(num_hidden_layers=TARGET_LAYERS)
    target.config.pad_token_id = pad
    assert PEagleDrafter.from_target(target, {}).config.mask_token_id == expected
