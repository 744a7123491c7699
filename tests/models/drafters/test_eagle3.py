"""EAGLE-3: its unrolled training against a loop over single rows, its tensors, its options."""

from typing import Any

import pytest
import torch
from support.eagle_reference import LayoutReference
from support.tiny_models import LENGTH, random_batch, tiny_drafter_of, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.eagle3_shape import default_feature_layers
from draftsmith.models.drafters.eagle3 import Eagle3Drafter

STEPS, TARGET_LAYERS, REDUCED = 3, 4, 40
# Everything is in fp64 but the norms and RoPE, which transformers computes in fp32.
TOLERANCE = 1e-6


def target_and_drafter(**options: Any) -> tuple[PreTrainedModel, Eagle3Drafter]:
    """In fp64."""
    target = tiny_target(num_hidden_layers=TARGET_LAYERS).double()
    drafter = tiny_drafter_of("eagle3", target, **{"ttt_steps": STEPS, **options})
    assert isinstance(drafter, Eagle3Drafter)
    return target, drafter


def reference_logits(drafter: Eagle3Drafter, ids_s: Tensor, features_sf: Tensor, t: int, steps: int) -> list[Tensor]:
    """[V] of depths 1..steps of group t: real rows up to t, then the layer fed with its own outputs and true tokens."""
    reference, ids = LayoutReference.of(drafter), ids_s.tolist()
    g = reference.eagle3_fused(torch.cat([torch.zeros_like(features_sf[:1]), features_sf[:t]]))
    logits = []
    for j in range(steps):
        out = reference.eagle3_slots(ids[: t + 1 + j], g)[-1]
        logits.append(reference.eagle3_logits(out))
        g = torch.cat([g, reference.eagle3_feedback(out, drafter.config.norm_output)[None]])
    return logits


NEWER: list[dict[str, Any]] = [
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True},
]  # EAGLE-3.1 and its kin


@pytest.mark.parametrize("options", [{}, {"attention": "dense"}, *NEWER])
def test_unrolled_training_equals_a_loop(options: dict[str, Any]) -> None:
    target, drafter = target_and_drafter(**options)
    batch = random_batch(target, 1, drafter=drafter)
    ids, features = batch["input_ids"], batch["features"]
    with torch.no_grad():
        training = drafter.group_logits(ids, features)[0]
        for t in range(LENGTH):
            expected = reference_logits(drafter, ids[0], features[0], t, min(STEPS, LENGTH - t))
            for j, logits_v in enumerate(expected):
                torch.testing.assert_close(training[j, t], logits_v, atol=TOLERANCE, rtol=TOLERANCE)


def test_with_norm_output_what_is_fed_back_does_not_grow() -> None:
    """The paper's reason for it: an output twice as large changes the next step, or nothing at all."""
    for options, grows in (({}, True), ({"norm_output": True}, False)):
        _, drafter = target_and_drafter(**options)
        out, ids = torch.randn(1, 32, dtype=torch.float64), torch.tensor([5])
        with torch.no_grad():
            once, doubled = (drafter.drafted_inputs(ids, scale * out) for scale in (1.0, 2.0))
        assert ((once - doubled).abs().max() > 1e-3) == grows


def test_it_starts_from_the_targets_last_layer() -> None:
    """A token and a feature that are equal go through the projections as the feature alone does in the target."""
    target = tiny_target(num_hidden_layers=TARGET_LAYERS)
    drafter = Eagle3Drafter.from_target(target, {})
    mine, theirs = drafter.layers[0], target.base_model.layers[-1]
    same = torch.randn(5, 32)
    twice = torch.cat([same, same], dim=-1)
    torch.testing.assert_close(mine.self_attn.k_proj(twice), 2**0.5 * theirs.self_attn.k_proj(same))
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "post_attention_layernorm"):
        assert torch.equal(mine.get_submodule(name).weight, theirs.get_submodule(name).weight)
    assert torch.equal(mine.hidden_norm.weight, theirs.input_layernorm.weight)


def test_it_drafts_deeper_than_it_was_trained_if_asked() -> None:
    _, drafter = target_and_drafter()
    assert drafter.decoder(LENGTH).num_depths == drafter.config.num_depths == STEPS
    _, drafter = target_and_drafter(draft_depth=7)
    assert (drafter.decoder(LENGTH).num_depths, drafter.config.num_depths) == (7, STEPS)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (32, [2, 16, 29]), (8, [2, 4, 5]), (7, [2, 3, 4]), (6, [2, 3, 4]), (5, [1, 2, 3]), (4, [1, 2, 3]),
        (3, [0, 1, 2]), (2, [0, 1]), (1, [0]),
    ],
)  # fmt: skip
def test_default_feature_layers(num_layers: int, expected: list[int]) -> None:
    assert default_feature_layers(num_layers) == expected
