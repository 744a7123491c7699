"""EAGLE: its drafts against a recomputation without a cache, the noise on its features, and EAGLE-3's first values."""

import pytest
import torch
from support.eagle_reference import eagle_features, pairs
from support.tiny_models import LENGTH, random_batch, tiny_drafter_of, tiny_target
from torch import Tensor

from draftsmith.models.drafters.eagle3 import Eagle3Drafter
from draftsmith.models.target.features import target_features


def test_drafted_chain_equals_a_recomputation_without_cache() -> None:
    """Deeper than in training: the layer's output is fed back. Trees are in test_every_drafter.py."""
    target, chain = tiny_target(), [7, 11, 30, 8]
    drafter = tiny_drafter_of("eagle", target)
    ids = random_batch(target, 1)["input_ids"]
    features = target_features(target, ids)[0]
    decoder = drafter.decoder(LENGTH)
    decoder.start(ids[0, :4], features[:4])
    for begin, end in ((4, 5), (5, 9)):
        decoder.observe(ids[0, begin:end], features[begin - 1 : end - 1])
        drafted = [decoder.begin(), *(decoder.expand([token], [node]) for node, token in enumerate(chain))]
        inputs = pairs(drafter, target, ids[0, :end].tolist(), torch.cat([torch.zeros(1, 32), features[: end - 1]]))
        for logits, token in zip(drafted, [*chain, 0], strict=True):
            rows = range(len(inputs))
            predicted = eagle_features(drafter, inputs, list(rows), [list(range(row + 1)) for row in rows])[-1:]
            expected = predicted @ target.get_output_embeddings().weight.T
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
            inputs = torch.cat([inputs, pairs(drafter, target, [token], predicted)])


def test_noise_is_added_to_features_in_training_only() -> None:
    target = tiny_target()
    drafter = tiny_drafter_of("eagle", target, feature_noise=0.2)
    batch = random_batch(target, drafter=drafter)
    clean = {name: tensor.clone() for name, tensor in batch.items()}
    read: list[Tensor] = []
    inputs_of = drafter.real_inputs

    def record(input_ids: Tensor, previous_features: Tensor) -> Tensor:
        read.append(previous_features)
        return inputs_of(input_ids, previous_features)

    drafter.real_inputs = record
    quiet = drafter(**batch).loss
    assert drafter(**batch).loss == quiet
    drafter.train()
    assert drafter(**batch).loss != drafter(**batch).loss
    noise, width = read[2][:, 1:] - batch["features"][:, :-1], 0.2 * 512 / LENGTH
    assert 0.95 * width < noise.abs().max() <= width * (1 + 1e-6)
    assert noise.abs().mean().item() == pytest.approx(width / 2, rel=0.1)  # of U(-a, a): a / 2
    assert noise.mean().item() == pytest.approx(0.0, abs=0.1 * width)
    assert not torch.equal(read[2], read[3])
    assert (read[2][:, 0] == 0).all()  # there is no feature before the first token
    torch.testing.assert_close(batch, clean, atol=0, rtol=0)
    drafter.config.feature_noise = 0.0
    assert drafter(**batch).loss == quiet


def test_eagle3_starts_from_the_targets_last_layer() -> None:
    """For an equal token and feature the projections give those of the target for the feature."""
    target = tiny_target(num_hidden_layers=4)
    drafter = Eagle3Drafter.from_target(target, {})
    mine, theirs = drafter.layers[0], target.base_model.layers[-1]
    same = torch.randn(5, 32)
    twice = torch.cat([same, same], dim=-1)
    torch.testing.assert_close(mine.self_attn.k_proj(twice), 2**0.5 * theirs.self_attn.k_proj(same))
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "post_attention_layernorm"):
        assert torch.equal(mine.get_submodule(name).weight, theirs.get_submodule(name).weight)
    assert torch.equal(mine.hidden_norm.weight, theirs.input_layernorm.weight)
