"""EAGLE: its tree against a recomputation without a cache, its loss against the formula, its layout."""

import pytest
import torch
from support.eagle_reference import eagle_features, pairs
from support.tiny_models import LENGTH, random_batch, tiny_drafter_of, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.target.features import target_features

# Levels of a tree of 8 nodes, as (tokens, parents): branches of unequal depth, and parents from two levels at once.
LEVELS = [([7, 11, 30], [0, 0, 0]), ([8, 9, 12], [1, 1, 3]), ([20], [5]), ([21, 22], [7, 2])]
PARENTS = [-1, *(parent for _, parents in LEVELS for parent in parents)]
TOKENS = [-1, *(token for tokens, _ in LEVELS for token in tokens)]


def tree_by_recomputation(
    drafter: Drafter, target: PreTrainedModel, ids: Tensor, features: Tensor, offset: int
) -> list[Tensor]:
    """Logits [V] of the children of node 0, 1, ..., each from a forward over all its rows, node after node."""
    newest = len(ids) - 1
    previous = torch.cat([torch.zeros_like(features[:1]), features[:newest]])
    inputs = pairs(drafter, target, ids.tolist(), previous)
    positions = [offset + place for place in range(len(ids))]
    sees = [list(range(place + 1)) for place in range(len(ids))]
    depths = [0]
    for node in range(1, len(TOKENS)):
        predicted = eagle_features(drafter, inputs, positions, sees)
        parent_row = newest + PARENTS[node]
        depths.append(depths[PARENTS[node]] + 1)
        inputs = torch.cat([inputs, pairs(drafter, target, [TOKENS[node]], predicted[parent_row].unsqueeze(0))])
        positions.append(offset + newest + depths[node])
        sees.append([*sees[parent_row], len(sees)])
    predicted = eagle_features(drafter, inputs, positions, sees)
    return list(predicted[newest:] @ target.get_output_embeddings().weight.T)


@pytest.mark.parametrize("offset", [0, 23])
def test_a_drafted_tree_equals_a_recomputation_without_cache(offset: int) -> None:
    """Deeper than training goes: feedback, positions and ancestors, and no trace of a tree in the round after it."""
    target = tiny_target()
    drafter = tiny_drafter_of("eagle", target)
    ids = random_batch(target, 1)["input_ids"]
    positions = torch.arange(LENGTH).unsqueeze(0) + offset
    features = target_features(target, ids, None, positions)[0]
    decoder = drafter.decoder(LENGTH)
    decoder.start(ids[0, :4], features[:4], position_offset=offset)
    for length in (5, 6, 9):
        committed = slice(length - 1, length) if length < 9 else slice(6, 9)
        decoder.observe(ids[0, committed], features[committed.start - 1 : committed.stop - 1])
        drafted = [decoder.begin()]
        drafted += [decoder.expand(tokens, parents) for tokens, parents in LEVELS]
        with torch.no_grad():
            expected = tree_by_recomputation(drafter, target, ids[0, :length], features, offset)
        torch.testing.assert_close(torch.cat(drafted), torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_noise_on_what_is_read_in_training_only() -> None:
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
    noise = read[2][:, 1:] - batch["features"][:, :-1]
    assert 0.19 < noise.abs().max() <= 0.2 + 1e-6
    assert noise.abs().mean().item() == pytest.approx(0.1, rel=0.1)  # of U(-a, a): a / 2
    assert noise.mean().item() == pytest.approx(0.0, abs=0.02)
    assert not torch.equal(read[2], read[3])
    assert (read[2][:, 0] == 0).all()  # there is no feature before the first token
    torch.testing.assert_close(batch, clean, atol=0, rtol=0)
    drafter.config.feature_noise = 0.0
    assert drafter(**batch).loss == quiet
