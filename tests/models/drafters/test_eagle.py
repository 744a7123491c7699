"""EAGLE: its tree against a recomputation without a cache, its loss against the formula, its layout."""

import pytest
import torch
from support.eagle_reference import eagle_features, pairs
from support.tiny_models import LENGTH, random_batch, tiny_drafter_of, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.target.features import target_features

# Levels of a tree of 8 nodes, as (tokens, parents): branches of unequal depth, parents on two levels.
LEVELS = [([7, 11, 30], [0, 0, 0]), ([8, 9, 12], [1, 1, 3]), ([20], [5]), ([21, 22], [7, 2])]
PARENTS = [-1, *(parent for _, parents in LEVELS for parent in parents)]
TOKENS = [-1, *(token for tokens, _ in LEVELS for token in tokens)]


def tree_by_recomputation(drafter: Drafter, target: PreTrainedModel, ids: Tensor, features: Tensor) -> list[Tensor]:
    """Return logits [V] of the children of nodes 0, 1, ..., each from a full forward over its path."""
    newest = len(ids) - 1
    previous = torch.cat([torch.zeros_like(features[:1]), features[:newest]])
    inputs = pairs(drafter, target, ids.tolist(), previous)
    positions = [*range(len(ids))]
    sees = [list(range(place + 1)) for place in range(len(ids))]
    depths = [0]
    for node in range(1, len(TOKENS)):
        predicted = eagle_features(drafter, inputs, positions, sees)
        parent_row = newest + PARENTS[node]
        depths.append(depths[PARENTS[node]] + 1)
        inputs = torch.cat([inputs, pairs(drafter, target, [TOKENS[node]], predicted[parent_row].unsqueeze(0))])
        positions.append(newest + depths[node])
        sees.append([*sees[parent_row], len(sees)])
    predicted = eagle_features(drafter, inputs, positions, sees)
    return list(predicted[newest:] @ target.get_output_embeddings().weight.T)


def test_drafted_tree_equals_a_recomputation_without_cache() -> None:
    """Deeper than in training: feedback, positions and ancestors; the tree leaves no trace in the next round."""
    target = tiny_target()
    drafter = tiny_drafter_of("eagle", target)
    ids = random_batch(target, 1)["input_ids"]
    features = target_features(target, ids)[0]
    decoder = drafter.decoder(LENGTH)
    decoder.start(ids[0, :4], features[:4])
    for length in (5, 6, 9):
        committed = slice(length - 1, length) if length < 9 else slice(6, 9)
        decoder.observe(ids[0, committed], features[committed.start - 1 : committed.stop - 1])
        drafted = [decoder.begin()]
        drafted += [decoder.expand(tokens, parents) for tokens, parents in LEVELS]
        with torch.no_grad():
            expected = tree_by_recomputation(drafter, target, ids[0, :length], features)
        torch.testing.assert_close(torch.cat(drafted), torch.stack(expected), atol=1e-5, rtol=1e-5)


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
