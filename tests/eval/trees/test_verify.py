"""Verification loses nothing: the distribution of its result is computed exactly and equals the target's.

`Outcomes` walks through every way the random choices of `walk` can fall, with its probability; the trees are drawn in
every way that the drafter can draw them. Nothing is estimated, so the tolerance is 1e-9.
"""

import pytest
import torch
from torch import Tensor

from draftsmith.eval.trees.enumeration import (
    DETERMINISTIC_TREES,
    MERGED_DRAWS,
    SAMPLED_TREES,
    V,
    can_be_drawn,
    draws,
    every_verdict,
    joint_distribution,
    largest_error,
    merged_joint_distribution,
    target_and_draft,
    wanted_joint,
)
from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.eval.trees.verify import Sampling, Verdict, verify

SAMPLINGS = [Sampling(1.0), Sampling(0.6), Sampling(1.3, top_k=2), Sampling(1.0, top_p=0.7)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("parents", SAMPLED_TREES.values(), ids=SAMPLED_TREES.keys())
def test_sampled_trees_keep_the_distribution(parents: tuple[int, ...], sampling: Sampling) -> None:
    target_of, draft_logits = target_and_draft(0)
    q_of_depth = [sampling.probabilities(logits) for logits in draft_logits]
    if not can_be_drawn(parents, q_of_depth):
        pytest.skip("the builders never draw more siblings than q has tokens")
    joint = joint_distribution(parents, target_of, q_of_depth, None, sampling)
    torch.testing.assert_close(joint, wanted_joint(target_of, sampling), atol=1e-9, rtol=0)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("parents", "tokens"), DETERMINISTIC_TREES)
def test_deterministic_trees_keep_the_distribution(
    parents: tuple[int, ...], tokens: list[int], sampling: Sampling
) -> None:
    target_of, _ = target_and_draft(2)
    joint = joint_distribution(parents, target_of, None, tokens, sampling)
    torch.testing.assert_close(joint, wanted_joint(target_of, sampling), atol=1e-9, rtol=0)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("models", MERGED_DRAWS)
def test_merged_trees_keep_the_distribution(models: tuple[int, ...], sampling: Sampling) -> None:
    """Independent draws from two different q's, equal ones merged."""
    target_of, draft_logits = target_and_draft(1)
    q_of_model = [sampling.probabilities(logits) for logits in draft_logits]
    joint = merged_joint_distribution(target_of, q_of_model, models, sampling)
    torch.testing.assert_close(joint, wanted_joint(target_of, sampling), atol=1e-9, rtol=0)


def test_a_merged_draw_is_one_node_but_two_draws() -> None:
    """p = (.2, .5, .3), q = (.6, .2, .2), x0 drawn twice: kept with 1/3, else never.

    p1 = norm(max(p - q, 0)) = (0, .75, .25); the second draw leaves norm(max(p1 - q, 0)) = (0, .55, .05) / .6. A
    verifier that forgot the duplicate would sample from p1.
    """
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([[0.6, 0.2, 0.2]], dtype=torch.float64)
    tree = DraftTree([9, 0], TreeShape.chain(1), q, draws=[[(1, 0), (1, 0)], []])
    result = torch.zeros(3, dtype=torch.float64)
    for probability, verdict in every_verdict(tree, p.log().expand(2, 3), Sampling(1.0)):
        result[0 if len(verdict.path) > 1 else verdict.next_token] += probability
    wanted = torch.tensor([1 / 3, 2 / 3 * 0.55 / 0.6, 2 / 3 * 0.05 / 0.6], dtype=torch.float64)
    torch.testing.assert_close(result, wanted, atol=1e-12, rtol=0)


def test_the_largest_error_over_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `draftsmith prove` reports; and it would report a verifier that forgets what siblings have covered."""
    assert largest_error(SAMPLINGS[:2]) <= 1e-9
    monkeypatch.setattr("draftsmith.eval.trees.verify._residual", lambda p, q, token: p)
    assert largest_error(SAMPLINGS[:1]) > 1e-2


def test_a_perfect_drafter_is_always_accepted() -> None:
    """p = q: acceptance rate 1, whatever rounding does to the residual."""
    logits = torch.randn(V, dtype=torch.float64)
    q = logits.softmax(-1)
    for token in range(V):
        tree = DraftTree([0, token], TreeShape.chain(1), q.expand(2, V))
        accepted = sum(
            probability
            for probability, verdict in every_verdict(tree, logits.expand(2, V), Sampling(1.0))
            if len(verdict.path) == 2
        )
        assert accepted == pytest.approx(1.0)


def test_acceptance_rate_is_the_overlap_of_p_and_q() -> None:
    """alpha = sum min(p, q) (Leviathan et al., theorem 3.5)."""
    target_of, (draft, _) = target_and_draft(3)
    p, q = target_of[()].softmax(-1), draft.softmax(-1)
    rate = 0.0
    for token in range(V):
        tree = DraftTree([0, token], TreeShape.chain(1), q.expand(2, V))
        for probability, verdict in every_verdict(tree, target_of[()].expand(2, V), Sampling(1.0)):
            rate += float(q[token]) * probability * (len(verdict.path) - 1)
    assert rate == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-9)


def first_token_of(p: Tensor, q: Tensor, lenience: float, count: int = 1) -> Tensor:
    """[V]: the exact distribution of the first token, from `count` siblings drawn from q without replacement."""
    result = torch.zeros_like(p)
    shape = TreeShape.of((-1, *[0] * count))
    for weight, tokens in draws(q, count):
        tree = DraftTree([0, *tokens], shape, q.expand(count + 1, len(q)))
        for probability, verdict in every_verdict(tree, p.log().expand(count + 1, len(p)), Sampling(1.0), lenience):
            first = tree.tokens[verdict.path[1]] if len(verdict.path) > 1 else verdict.next_token
            result[first] += weight * probability
    return result


def test_lenience_by_hand() -> None:
    """p = (.5, .3, .2), q = (.2, .2, .6), l = 1/2.

    Accepted: x0 and x1 always, as p >= l q; x2 with .2 / .3 = 2/3. So .2, .2 and .4 come from the draft. The other .2
    come from norm(max(p - q, 0)) = (.3, .1, 0) / .4: x0 gets .15 and x1 .05.
    """
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    wanted = torch.tensor([0.35, 0.25, 0.4], dtype=torch.float64)
    torch.testing.assert_close(first_token_of(p, q, 0.5), wanted, atol=1e-12, rtol=0)
    # alpha = sum min(p / l, q) = .2 + .2 + .4; with l = 1/3 x2 is always accepted: what is drafted is q.
    torch.testing.assert_close(first_token_of(p, q, 1 / 3), q, atol=1e-12, rtol=0)
    torch.testing.assert_close(first_token_of(p, q, 1.0), p, atol=1e-12, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_likelier_than_lenience_allows(seed: int, count: int) -> None:
    """A.5's guarantee, p / l, and that without lenience nothing changes; of siblings too."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 4, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    torch.testing.assert_close(first_token_of(p, q, 1.0, count), p, atol=1e-12, rtol=0)
    for lenience in (0.8, 0.4, 0.1):
        result = first_token_of(p, q, lenience, count)
        assert float(result.sum()) == pytest.approx(1)
        assert (result <= p / lenience + 1e-12).all()
        assert float((result - p).abs().max()) > 1e-3


def test_lenience_of_a_deterministic_child() -> None:
    """q = the point mass on x: accepted with p(x) / l = .2 / .5, else p without x: .6 times (.625, .375, 0)."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    tree = DraftTree([0, 2], TreeShape.chain(1))
    result = torch.zeros(3, dtype=torch.float64)
    for probability, verdict in every_verdict(tree, p.log().expand(2, 3), Sampling(1.0), 0.5):
        result[tree.tokens[verdict.path[1]] if len(verdict.path) > 1 else verdict.next_token] += probability
    torch.testing.assert_close(result, torch.tensor([0.375, 0.225, 0.4]).double(), atol=1e-7, rtol=0)


def test_greedy_lenience() -> None:
    """p = (.5, .4, .1): of the children 1 and 2 with l = .75 the first is good enough (.4 >= .375), with .85 none."""
    logits = torch.tensor([0.5, 0.4, 0.1]).log().expand(3, 3) * 1.0
    tree = DraftTree([9, 2, 1], TreeShape.of((-1, 0, 0)))
    assert verify(tree, logits, Sampling(), lenience=0.75).path == [0, 2]
    assert verify(tree, logits, Sampling(), lenience=0.15).path == [0, 2]  # the likelier of two
    assert verify(tree, logits, Sampling(), lenience=0.85) == Verdict([0], 0)
    assert verify(tree, logits, Sampling()) == Verdict([0], 0)
    with_best = DraftTree([9, 1, 0], TreeShape.of((-1, 0, 0)))
    assert verify(with_best, logits, Sampling(), lenience=0.15).path == [0, 2]


def test_greedy_follows_the_argmax() -> None:
    tree = DraftTree([9, 1, 2, 3, 0], TreeShape.of((-1, 0, 0, 2, 3)))
    logits = torch.full((5, V), -1.0)
    logits[0, 2] = logits[2, 3] = logits[3, 1] = 5.0
    verdict = verify(tree, logits, Sampling())
    assert (verdict.path, verdict.next_token) == ([0, 2, 3], 1)
    logits[0, 2] = -2.0
    assert verify(tree, logits, Sampling()).path == [0]


def test_probabilities_are_standardised() -> None:
    """By hand: softmax([2, 1, 0]) = [.665, .245, .090]; top-p .7 needs the first two, top-k 1 the first."""
    logits = torch.tensor([2.0, 1.0, 0.0])
    torch.testing.assert_close(
        Sampling(1.0, top_p=0.7).probabilities(logits), torch.tensor([0.7311, 0.2689, 0.0]), atol=1e-4, rtol=0
    )
    assert Sampling(1.0, top_k=1).probabilities(logits).tolist() == [1.0, 0.0, 0.0]
    assert Sampling(0.0).probabilities(logits).tolist() == [1.0, 0.0, 0.0]
    assert Sampling(1.0).probabilities(logits.bfloat16()).dtype == torch.float32
    for bad, message in [((-1.0,), "temperature"), ((1.0, -1), "top_k"), ((1.0, 0, 0.0), "top_p")]:
        with pytest.raises(ValueError, match=message):
            Sampling(*bad)
