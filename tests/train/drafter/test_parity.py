"""The train = decode check itself: right drafters pass, each kind of wrong one is found, at the right place."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_models import VOCABULARY, random_batch, tiny_target
from torch import Tensor

from draftsmith.models.decoding.protocols import ALL_TOKENS
from draftsmith.models.drafters.parallel import ParallelDrafter
from draftsmith.train.drafter.parity import TOLERANCE, loop_like_prefixes, perturb, worst_difference

LENGTH, DEPTHS, FEATURES = 12, 3, 5
IDS = torch.tensor([7, 3, 9, 9, 1, 4, 60, 2, 8, 5, 5, 11])


class ChainDrafter:
    """Depth d after x_t: A[newest] + B[the one before it] + C h_{t-1} + the position. Reads its own drafted tokens."""

    feature_layers = (-1,)

    def __init__(self, decoder_class: type["ChainDecoder"]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.a, self.b = (torch.randn(VOCABULARY, VOCABULARY, generator=generator) for _ in range(2))
        self.c = torch.randn(FEATURES, VOCABULARY, generator=generator)
        self.config = SimpleNamespace(num_depths=DEPTHS)
        self._decoder_class = decoder_class

    def logits(self, before: int, newest: int, feature_f: Tensor, position: int) -> Tensor:
        return self.a[newest] + self.b[before] + feature_f @ self.c + 0.1 * position * self.a[0]

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        out = torch.zeros(1, DEPTHS, length, VOCABULARY)
        ids = [0, *input_ids[0].tolist()]
        for t in range(1, length):
            for j in range(min(DEPTHS, length - t)):
                position = int(position_ids[0, t]) + j
                out[0, j, t] = self.logits(ids[t + j], ids[t + j + 1], features[0, t - 1], position)
        return out

    def decoder(self, max_length_tokens: int) -> "ChainDecoder":
        return self._decoder_class(self)


class ChainDecoder:
    """Knows the path to every node, so that siblings do not disturb each other."""

    num_depths, columns = DEPTHS, ALL_TOKENS

    def __init__(self, drafter: ChainDrafter) -> None:
        self.drafter = drafter

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        self.committed, self.feature, self.offset = prompt_ids.tolist(), features[-1], position_offset

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        self.committed += committed_ids.tolist()
        self.feature = features[-1]

    def begin(self) -> Tensor:
        self.paths = [self.committed[-2:]]
        return self._logits(self.paths[0])[None]

    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        new = [[*self._path_of(parent), token] for token, parent in zip(tokens, parents, strict=True)]
        self.paths += new
        return torch.stack([self._logits(path) for path in new])

    def _path_of(self, node: int) -> list[int]:
        return self.paths[node]

    def _logits(self, path: list[int]) -> Tensor:
        position = self.offset + len(self.committed) + len(path) - 3
        return self.drafter.logits(path[-2], path[-1], self.feature, position)


class LooksAtTheSibling(ChainDecoder):
    """Its children hang below the node that was added last but one, whatever the parent is."""

    def _path_of(self, node: int) -> list[int]:
        return self.paths[max(0, node - 1)]


class OldFeature(ChainDecoder):
    """Keeps the first feature that a round observed."""

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        super().observe(committed_ids, features)
        self.feature = features[0]


class ForgetsTheOffset(ChainDecoder):
    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        super().start(prompt_ids, features)


class GivesNan(ChainDecoder):
    def begin(self) -> Tensor:
        return super().begin() * float("nan")


def chain_difference(decoder_class: type[ChainDecoder], prefixes: list[int], offset: int = 0) -> Any:
    features = torch.randn(LENGTH, FEATURES, generator=torch.Generator().manual_seed(1))
    drafter: Any = ChainDrafter(decoder_class)
    return worst_difference(drafter, tiny_target(), IDS, features, prefixes, offset)


def test_a_right_stepwise_drafter_passes() -> None:
    assert chain_difference(ChainDecoder, [2, 3, 6, 7, 11, 12], offset=23).size < 1e-5


def test_wrong_stepwise_drafters_are_found_where_they_go_wrong() -> None:
    prefixes = [2, 3, 6, 7]
    assert chain_difference(OldFeature, prefixes).prefix_tokens == 6  # the only round that commits several tokens
    assert chain_difference(LooksAtTheSibling, prefixes).depth == 3  # depth 2 hangs below node 0 either way
    assert chain_difference(ForgetsTheOffset, prefixes).size < 1e-5
    for wrong, offset in ((OldFeature, 0), (LooksAtTheSibling, 0), (ForgetsTheOffset, 5)):
        assert 0.1 < chain_difference(wrong, prefixes, offset).size < 100
    assert chain_difference(GivesNan, prefixes).size == float("inf")


@pytest.mark.parametrize("offset", [0, 23])
def test_the_parallel_drafter_passes_and_a_shifted_feature_does_not(offset: int) -> None:
    target = tiny_target()
    drafter: Any = ParallelDrafter.from_target(target, {"num_masks": 3}).eval()
    perturb(drafter)
    ids = random_batch(target, 1)["input_ids"]
    prefixes = loop_like_prefixes(ids.shape[1])
    assert prefixes == [8, 9, 11]
    assert worst_difference(drafter, target, ids, None, prefixes, offset).size < TOLERANCE
    real_inputs = drafter.real_inputs
    drafter.real_inputs = lambda ids, previous: real_inputs(ids, previous.roll(1, -2))
    assert worst_difference(drafter, target, ids, None, prefixes, offset).size > 0.01


def test_a_reduced_vocabulary_must_be_the_same_on_both_sides() -> None:
    """-inf on both sides counts for nothing; on one side it is a difference that no tolerance covers."""
    missing = torch.zeros(VOCABULARY, dtype=torch.bool)
    missing[5:50] = True

    class Reduced(ChainDrafter):
        def logits(self, *args: Any) -> Tensor:
            return super().logits(*args).masked_fill(missing, float("-inf"))

    class Widened(ChainDecoder):
        def begin(self) -> Tensor:
            return super().begin().clamp(min=-100)

    features = torch.zeros(LENGTH, FEATURES)
    right: Any = Reduced(ChainDecoder)
    wrong: Any = Reduced(Widened)
    assert worst_difference(right, tiny_target(), IDS, features, [4, 5]).size < 1e-5
    assert worst_difference(wrong, tiny_target(), IDS, features, [4, 5]).size == float("inf")


def test_perturbing_is_small_complete_and_repeatable() -> None:
    target = tiny_target()
    torch.manual_seed(0)
    drafters = [ParallelDrafter.from_target(target, {"init": "target"}) for _ in range(2)]
    drafters[1].load_state_dict(drafters[0].state_dict())
    before = {name: parameter.clone() for name, parameter in drafters[0].named_parameters()}
    for drafter in drafters:
        perturb(drafter)
    for name, parameter in drafters[0].named_parameters():
        moved = (parameter - before[name]).square().mean().sqrt() / before[name].square().mean().sqrt()
        assert 0.05 < moved < 0.15, name
        assert torch.equal(parameter, drafters[1].get_parameter(name))


def test_prefixes() -> None:
    assert loop_like_prefixes(16) == [9, 10, 12, 16]
    assert loop_like_prefixes(2) == [2]
    for wrong in ([], [1, 2], [3, 3], [5, 4], [13]):
        with pytest.raises(ValueError, match="must ascend from at least 2 to at most 12"):
            chain_difference(ChainDecoder, wrong)
