"""EAGLE-3's and P-EAGLE's initial values and defaults; their forwards are in tests/models/formats/test_import.py."""

import pytest
import torch
from support.tiny_models import LENGTH, tiny_drafter_of, tiny_target

from draftsmith.models.drafters.eagle3 import Eagle3Drafter, default_feature_layers
from draftsmith.models.drafters.peagle import PEagleDrafter

TARGET_LAYERS = 4


def test_eagle3_starts_from_the_targets_last_layer() -> None:
    """For an equal token and feature the projections give those of the target for the feature."""
    target = tiny_target(num_hidden_layers=TARGET_LAYERS)
    drafter = Eagle3Drafter.from_target(target, {})
    mine, theirs = drafter.layers[0], target.base_model.layers[-1]
    same = torch.randn(5, 32)
    twice = torch.cat([same, same], dim=-1)
    torch.testing.assert_close(mine.self_attn.k_proj(twice), 2**0.5 * theirs.self_attn.k_proj(same))
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "post_attention_layernorm"):
        assert torch.equal(mine.get_submodule(name).weight, theirs.get_submodule(name).weight)
    assert torch.equal(mine.hidden_norm.weight, theirs.input_layernorm.weight)


def test_draft_depth_may_exceed_the_trained_depth() -> None:
    for options, drafted in (({}, 3), ({"draft_depth": 7}, 7)):
        drafter = tiny_drafter_of("eagle3", tiny_target(num_hidden_layers=TARGET_LAYERS), ttt_steps=3, **options)
        assert (drafter.decoder(LENGTH).num_depths, drafter.config.num_depths) == (drafted, 3)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (32, [2, 16, 29]), (8, [2, 4, 5]), (7, [2, 3, 4]), (6, [2, 3, 4]), (5, [1, 2, 3]), (4, [1, 2, 3]),
        (3, [0, 1, 2]), (2, [0, 1]), (1, [0]),
    ],
)  # fmt: skip
def test_default_feature_layers(num_layers: int, expected: list[int]) -> None:
    assert default_feature_layers(num_layers) == expected


@pytest.mark.parametrize(("pad", "expected"), [(0, 0), (17, 17), (None, 60), (-1, 60), (2, 60)])
def test_default_mask_token_of_peagle(pad: int | None, expected: int) -> None:
    """It is the padding token, or the last of the vocabulary of 61; 2 ends every turn."""
    target = tiny_target(num_hidden_layers=TARGET_LAYERS)
    target.config.pad_token_id = pad
    assert PEagleDrafter.from_target(target, {}).config.mask_token_id == expected
