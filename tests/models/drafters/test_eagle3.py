"""EAGLE-3's and P-EAGLE's initial values and defaults; their forwards are in tests/models/formats/test_import.py."""

import torch
from support.tiny_models import tiny_target

from draftsmith.models.drafters.eagle3 import Eagle3Drafter

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
