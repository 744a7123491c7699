"""The proof holds for lossless methods, fails for others, and separates ties from bugs."""

from typing import Any

import pytest
import torch
from support.tiny_models import long_rope, tiny_target
from torch import Tensor

from draftsmith.cli.artifacts import DistributionProof, GreedyProof, Proof
from draftsmith.cli.prove import (
    _test,
    chi_square_uniform,
    rosenblatt,
)
from draftsmith.eval.bench.measured_methods import Arm
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.report.sentences import proof_sentence
from draftsmith.eval.trees import verify
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.sampling import Sampling

PROMPT = [5, 9, 33, 12]


class Guess(Method):
    """Method that drafts two tokens from a fixed q at depths 1 and 2."""

    name = "guess"

    def __init__(self, q: Tensor, generator: torch.Generator) -> None:
        self._q, self._generator = q, generator

    def propose(self) -> DraftTree:
        drawn = torch.multinomial(self._q, 2, replacement=True, generator=self._generator).tolist()
        return DraftTree([self._newest, *drawn], TreeShape.chain(2), self._q.expand(3, -1))


def distribution_proof(temperature: float = 1.0, target: Any = None) -> DistributionProof:
    """Test 60 answers of 20 tokens."""
    target, sampling = target or tiny_target(), Sampling(temperature)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(target.config.vocab_size, generator=torch.Generator().manual_seed(5)).softmax(-1)
    measured = Arm(Guess(q, generator), sampling, generator)
    with TargetSession(target, 64) as session:
        drawn = [
            (PROMPT, generate(session, measured.method, PROMPT, sampling, 20, (), generator).ids) for _ in range(60)
        ]
    return _test(target, measured, drawn)


@pytest.mark.slow
def test_lossless_sampling_passes_and_lossy_sampling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that accepts twice as often barely changes the text, but is found; so are greedy answers."""
    proof = distribution_proof()
    assert (proof.tokens, proof.impossible) == (1200, 0)
    assert proof.p_value > 0.01
    assert proof.holds(1e-3)
    original = verify.RandomChooser.accept
    with monkeypatch.context() as patch:
        patch.setattr(verify.RandomChooser, "accept", lambda self, p: original(self, (2.0 * p).clamp_max(1.0)))
        assert distribution_proof().p_value < 1e-4

    def greedy(tree: DraftTree, logits: Tensor, *_: Any) -> verify.Verification:
        return verify.Verification([0], int(logits[0].argmax()))

    monkeypatch.setattr("draftsmith.eval.decoding.generate.verify", greedy)
    assert distribution_proof().p_value < 1e-6


@pytest.mark.slow
def test_answers_across_the_length_where_angles_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is compared with the probabilities by the angles that a text of its length has."""
    target = tiny_target(
        "phi3", rope_parameters=long_rope(14), original_max_position_embeddings=14, sliding_window=None
    )
    assert distribution_proof(0.1, target=target).p_value > 0.01
    monkeypatch.setattr("draftsmith.cli.prove.rope_switch", lambda target: None)  # as if one forward were enough
    assert distribution_proof(0.1, target=target).p_value < 1e-3


def test_rosenblatt_by_hand() -> None:
    """Token 2 (.5) covers [0, .5), token 0 (.3) [.5, .8), tokens 1 and 3 (.1 each) share [.8, 1)."""
    p = torch.tensor([0.3, 0.1, 0.5, 0.1])
    u, impossible = rosenblatt(p.expand(4, 4), torch.tensor([2, 0, 1, 3]), torch.Generator().manual_seed(0))
    assert impossible == 0
    bounds = [(0.0, 0.5), (0.5, 0.8), (0.8, 1.0), (0.8, 1.0)]
    assert all(low - 1e-6 <= value < high + 1e-6 for value, (low, high) in zip(u.tolist(), bounds, strict=True))
    _, impossible = rosenblatt(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), torch.Generator())
    assert impossible == 1


def test_chi_square_by_hand() -> None:
    """20 bins of 100, 39 numbers moved from one bin to the next: 2 * 39 * 39 / 100; by a table, 30.14 has p = .05."""
    u = (torch.arange(2000).double() + 0.5) / 2000
    assert chi_square_uniform(u) == (0.0, 1.0)
    u[:39] = u[100]
    statistic, p_value = chi_square_uniform(u)
    assert statistic == pytest.approx(30.42)
    assert 0.045 < p_value < 0.05


def test_every_part_of_the_proof_must_hold() -> None:
    good = DistributionProof("x", 1.0, 100, 0, 19.0, 0.4)
    assert Proof([GreedyProof("x", 1, 12)], [good], 1e-12, []).holds
    assert not Proof([], [good], 1e-3, []).holds
    unlikely = DistributionProof("x", 1.0, 100, 0, 60.0, 4e-4)
    assert not Proof([], [unlikely, good][:1], 0.0, []).holds
    assert Proof([], [unlikely, good, good], 0.0, []).holds  # one of three tests may have such a p-value
    impossible = DistributionProof("x", 1.0, 100, 1, 19.0, 0.4)
    proof = Proof([GreedyProof("x", 1, 12)], [impossible], 0.0, [])
    assert not proof.holds
    sentence = proof_sentence(proof.as_json())
    assert sentence is not None
    assert sentence.startswith("NOT PROVED: 12 greedy tokens of 1 method(s)")
    lenient = proof_sentence(Proof([], [], 0.0, [], ["hasty", "sloppy"]).as_json())
    assert lenient is not None
    assert lenient.endswith("Not lossless, left out: hasty, sloppy.")
