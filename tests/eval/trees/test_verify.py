"""Verification is lossless: the distribution of its result is computed exactly and equals the target's.

`Outcomes` enumerates every outcome of the random choices of `walk` with its probability, for every tree that the
drafter can draw. Nothing is estimated, so the tolerance is 1e-9.
"""

import math

import pytest
import torch
from torch import Tensor

from draftsmith.eval.trees import enumeration
from draftsmith.eval.trees.enumeration import (
    V,
    draws,
    every_verification,
    largest_error,
    target_and_draft,
)
from draftsmith.eval.trees.verify import DraftTree, TreeShape, Verification, verify
from draftsmith.models.kernels.cpu_kernels import largest, most_likely
from draftsmith.models.sampling import Sampling, drawn

SAMPLINGS = [Sampling(1.0), Sampling(0.6), Sampling(1.3, top_k=2), Sampling(1.0, top_p=0.7)]


def test_merged_draw_is_one_node_but_two_draws() -> None:
    """p = (.2, .5, .3), q = (.6, .2, .2), x0 drawn twice: the first is accepted with 1/3, the second never.

    p1 = norm(max(p - q, 0)) = (0, .75, .25); the second draw leaves norm(max(p1 - q, 0)) = (0, .55, .05) / .6. A
    verifier that forgot the duplicate would sample from p1.
    """
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([[0.6, 0.2, 0.2]], dtype=torch.float64)
    tree = DraftTree([9, 0], TreeShape.chain(1), q, draws=[[(1, 0), (1, 0)], []])
    result = torch.zeros(3, dtype=torch.float64)
    for probability, verification in every_verification(tree, p.log().expand(2, 3), Sampling(1.0)):
        result[0 if len(verification.path) > 1 else verification.next_token] += probability
    wanted = torch.tensor([1 / 3, 2 / 3 * 0.55 / 0.6, 2 / 3 * 0.05 / 0.6], dtype=torch.float64)
    torch.testing.assert_close(result, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_tree_keeps_the_distribution(sampling: Sampling) -> None:
    """Trees are sampled, deterministic or merged from two drafters, as in `draftsmith prove`."""
    assert largest_error([sampling]) <= 1e-9


def test_verifier_that_ignores_rejected_siblings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.eval.trees.verify._residual", lambda p, q, token: p)
    monkeypatch.setattr(enumeration, "SAMPLED_TREES", {"chain of 1": (-1, 0), "chain of 2": (-1, 0, 1)})
    assert largest_error(SAMPLINGS[:1]) > 1e-2


def test_acceptance_rate_is_the_overlap_of_p_and_q() -> None:
    """alpha = sum min(p, q) (Leviathan et al., theorem 3.5)."""
    target_of, (draft, _) = target_and_draft(3)
    p, q = target_of[()].softmax(-1), draft.softmax(-1)
    rate = 0.0
    for token in range(V):
        tree = DraftTree([0, token], TreeShape.chain(1), q.expand(2, V))
        for probability, verification in every_verification(tree, target_of[()].expand(2, V), Sampling(1.0)):
            rate += float(q[token]) * probability * (len(verification.path) - 1)
    assert rate == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-9)


def first_token_distribution(p: Tensor, q: Tensor, lenience: float, count: int = 1) -> Tensor:
    """Return the exact distribution [V] of the first token, for `count` siblings drawn from q without replacement."""
    result = torch.zeros_like(p)
    shape = TreeShape.of((-1, *[0] * count))
    for weight, tokens in draws(q, count):
        tree = DraftTree([0, *tokens], shape, q.expand(count + 1, len(q)))
        logits = p.log().expand(count + 1, len(p))
        for probability, verification in every_verification(tree, logits, Sampling(1.0), lenience):
            first = tree.tokens[verification.path[1]] if len(verification.path) > 1 else verification.next_token
            result[first] += weight * probability
    return result


def test_lenience_by_hand() -> None:
    """p = (.5, .3, .2), q = (.2, .2, .6), l = 1/2.

    x0 and x1 are always accepted, as p >= l q; x2 with .2 / .3 = 2/3: .2, .2 and .4 come from the draft. The other .2
    come from norm(max(p - q, 0)) = (.3, .1, 0) / .4: x0 gets .15 and x1 .05.
    """
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    wanted = torch.tensor([0.35, 0.25, 0.4], dtype=torch.float64)
    torch.testing.assert_close(first_token_distribution(p, q, 0.5), wanted, atol=1e-12, rtol=0)
    # alpha = sum min(p / l, q) = .2 + .2 + .4; with l = 1/3 x2 is always accepted, which gives q.
    torch.testing.assert_close(first_token_distribution(p, q, 1 / 3), q, atol=1e-12, rtol=0)
    torch.testing.assert_close(first_token_distribution(p, q, 1.0), p, atol=1e-12, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_lenience_bounds_the_probability_of_every_token(seed: int, count: int) -> None:
    """The bound p / l of appendix A.5, also for siblings; without lenience nothing changes."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 4, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    torch.testing.assert_close(first_token_distribution(p, q, 1.0, count), p, atol=1e-12, rtol=0)
    for lenience in (0.8, 0.4, 0.1):
        result = first_token_distribution(p, q, lenience, count)
        assert float(result.sum()) == pytest.approx(1)
        assert (result <= p / lenience + 1e-12).all()
        assert float((result - p).abs().max()) > 1e-3


def test_lenience_of_a_deterministic_child() -> None:
    """q is the point mass on x: accepted with p(x) / l = .2 / .5, otherwise p without x: .6 times (.625, .375, 0)."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    tree = DraftTree([0, 2], TreeShape.chain(1))
    result = torch.zeros(3, dtype=torch.float64)
    for probability, verification in every_verification(tree, p.log().expand(2, 3), Sampling(1.0), 0.5):
        path = verification.path
        result[tree.tokens[path[1]] if len(path) > 1 else verification.next_token] += probability
    torch.testing.assert_close(result, torch.tensor([0.375, 0.225, 0.4]).double(), atol=1e-7, rtol=0)


def test_greedy_lenience() -> None:
    """p = (.5, .4, .1): of the children 1 and 2 with l = .75 the first is accepted (.4 >= .375), with .85 none."""
    logits = torch.tensor([0.5, 0.4, 0.1]).log().expand(3, 3) * 1.0
    tree = DraftTree([9, 2, 1], TreeShape.of((-1, 0, 0)))
    assert verify(tree, logits, Sampling(), lenience=0.75).path == [0, 2]
    assert verify(tree, logits, Sampling(), lenience=0.15).path == [0, 2]  # the likelier of two
    assert verify(tree, logits, Sampling(), lenience=0.85) == Verification([0], 0)
    assert verify(tree, logits, Sampling()) == Verification([0], 0)
    with_best = DraftTree([9, 1, 0], TreeShape.of((-1, 0, 0)))
    assert verify(with_best, logits, Sampling(), lenience=0.15).path == [0, 2]


# ---- greedy choices, draws, and their distribution ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_argmax_of_equal_logits_is_the_first(dtype: torch.dtype) -> None:
    """bf16 has many ties: taking the first everywhere makes greedy decoding deterministic."""
    logits = torch.randn(7, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3, [4, 900, 4999]] = 9.0
    assert torch.equal(largest(logits), logits.argmax(-1))
    assert largest(logits)[3] == 4
    assert int(largest(logits[3])) == 4


def test_tokens_are_drawn_by_their_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand uniform numbers per row from 0 to just below 1: shares are exact, impossible tokens never drawn."""
    p = torch.tensor(
        [[0.0, 0.25, 0.0, 0.5, 0.25, 0.0], [0.125, 0.0, 0.0, 0.0, 0.0, 0.875], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]]
    )
    places = (torch.arange(1000, dtype=torch.float64)[:, None, None] + 0.5).expand(1000, 3, 1) / 1000
    monkeypatch.setattr(torch, "rand", lambda *_, **__: places)
    tokens = drawn(p.expand(1000, 3, 6), None)
    counts = torch.stack([(tokens == token).sum(0) for token in range(6)], dim=1)
    assert torch.equal(counts, (p * 1000).long())


@pytest.mark.parametrize(("place", "token"), [(0.0, 1), (1.0 - 2**-53, 3), (1.0, 3)])
def test_impossible_token_is_never_drawn(place: float, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, place, dtype=torch.float64))
    assert drawn(torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]), None).item() == token


def test_rare_tokens_keep_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^20 tokens of 2^-24 after one of 1 - 2^-4: a sum in fp32 would lose each of them."""
    rare = torch.full((1 + 2**20,), 2.0**-24)
    rare[0] = 1 - 2.0**-4
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 1 - 2.0**-5, dtype=torch.float64))
    assert drawn(rare, None).item() == 1 + 2**19


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-36, 1e-30, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_temperature_near_zero_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    """Logits over it overflow fp32 below 1e-36, and below 1e-45 fp32 cannot represent it. Ties are shared."""
    logits = torch.tensor([[-3.0, 40.0, 39.0, 1e3], [900.0, -900.0, 1.0, 900.0]], dtype=dtype)
    expected = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.0, 0.5]])
    for sampling in (Sampling(temperature), Sampling(temperature, top_k=2), Sampling(temperature, top_p=0.9)):
        assert torch.equal(sampling.probabilities(logits).float(), expected)
    chosen, log_q = most_likely(Sampling(temperature).scaled(logits), 3)
    assert (chosen[0][0], log_q[0][0]) == (3, 0.0)
    assert all(math.isfinite(each) for row in log_q for each in row)  # confidences are binned


def test_temperature_top_k_and_top_p_by_hand() -> None:
    """Logits log 16, log 8, log 4, log 1: at T = 2 the odds are 4 : 2.83 : 2 : 1, at T = 1 16 : 8 : 4 : 1 of 29."""
    logits = torch.tensor([16.0, 8.0, 4.0, 1.0], dtype=torch.float64).log()
    odds = torch.tensor([4.0, 8**0.5, 2.0, 1.0], dtype=torch.float64)
    assert torch.allclose(Sampling(2.0).probabilities(logits), odds / odds.sum(), atol=1e-12)
    two, three = (torch.tensor([16.0, 8.0, third, 0.0], dtype=torch.float64) for third in (0.0, 4.0))
    assert torch.allclose(Sampling(1.0, top_k=2).probabilities(logits), two / 24, atol=1e-12)
    # The token that reaches top_p stays: 16 / 29 = 0.55 alone is too little for 0.6, and 24 / 29 = 0.83 for 0.9.
    assert torch.allclose(Sampling(1.0, top_p=0.6).probabilities(logits), two / 24, atol=1e-12)
    assert torch.allclose(Sampling(1.0, top_p=0.9).probabilities(logits), three / 28, atol=1e-12)
    assert Sampling(1.0).probabilities(logits.bfloat16()).dtype == torch.float32
    for bad, message in [((-1.0,), "temperature"), ((1.0, -1), "top_k"), ((1.0, 0, 0.0), "top_p")]:
        with pytest.raises(ValueError, match=message):
            Sampling(*bad)
