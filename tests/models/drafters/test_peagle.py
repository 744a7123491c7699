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


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"attention": "dense"}, {"fc_norm": True}, {"norm_before_fc": True}])
def test_groups_equal_whole_sequences(num_layers: int, options: dict[str, Any]) -> None:
    """Group t is what vLLM runs: the true tokens up to x_t, then K rows of the mask token, in plain causal order."""
    target, drafter = target_and_drafter(num_layers=num_layers, **options)
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


def test_tensors_are_those_of_vllms_layout() -> None:
    """EAGLE-3's and `mask_hidden`; the mask token's embedding is the target's. The second layer is a plain one."""
    _, drafter = target_and_drafter(num_layers=2)
    shapes = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    assert shapes["mask_hidden"] == (1, 96)
    assert shapes["fc.weight"] == (32, 96)
    assert shapes["layers.0.self_attn.v_proj.weight"] == (16, 64)
    assert shapes["layers.1.self_attn.v_proj.weight"] == (16, 32)
    assert {name for name in shapes if "." not in name} == {"mask_hidden"}
    assert {name.split(".")[0] for name in shapes} == {"mask_hidden", "fc", "layers", "norm"}
    assert "layers.0.hidden_norm.weight" in shapes
    assert "layers.1.hidden_norm.weight" not in shapes


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


def test_conditional_drop_trains_fewer_deep_positions() -> None:
    """A third of [MASK]_1, a ninth of [MASK]_2, and only in training: within 5 standard deviations of their number."""
    target, drafter = target_and_drafter(num_masks=2, keep_ratio=1 / 3)
    batch = random_batch(target, 8, 120, drafter=drafter)
    torch.manual_seed(3)
    every = drafter.eval()(**batch).depth_count
    kept = drafter.train()(**batch).depth_count
    assert every is not None
    assert kept is not None
    assert kept[0] == every[0]
    for j, ratio in ((1, 1 / 3), (2, 1 / 9)):
        spread = (every[j] * ratio * (1 - ratio)) ** 0.5
        assert abs(kept[j] - every[j] * ratio) < 5 * spread


@pytest.mark.parametrize(("pad", "expected"), [(0, 0), (17, 17), (None, 60), (-1, 60)])
def test_default_mask_token(pad: int | None, expected: int) -> None:
    """The padding token, or the last of the vocabulary of 61."""
    target = tiny_target(num_hidden_layers=TARGET_LAYERS)
    target.config.pad_token_id = pad
    assert PEagleDrafter.from_target(target, {}).config.mask_token_id == expected
