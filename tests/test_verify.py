"""Verification loses nothing: the distribution of its result is computed exactly and equals the target's.

`Outcomes` walks through every way the random choices of `walk` can fall, with its probability; the trees are drawn in
every way that the drafter can draw them. Nothing is estimated, so the tolerance is 1e-9.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from draftsmith.eval.sampling import Sampling
from draftsmith.eval.tree import DraftTree, TreeShape
from draftsmith.eval.verify import Verdict, verify, walk

V = 4


class Outcomes:
    """A `Chooser` that replays one outcome and notes which other outcomes there are."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.position, self.probability = script, 0, 1.0
        self.branches: list[list[int]] = []

    def _choose(self, probabilities: list[float]) -> int:
        if self.position == len(self.script):
            options = [option for option, probability in enumerate(probabilities) if probability > 0]
            self.branches += [[*self.script, option] for option in options[1:]]
            self.script = [*self.script, options[0]]
        option = self.script[self.position]
        self.position += 1
        self.probability *= probabilities[option]
        return option

    def accept(self, probability: float) -> bool:
        return self._choose([1 - probability, probability]) == 1

    def draw(self, probabilities: Tensor) -> int:
        return self._choose(probabilities.tolist())


def every_verdict(tree: DraftTree, logits: Tensor, sampling: Sampling) -> Iterator[tuple[float, Verdict]]:
    scripts: list[list[int]] = [[]]
    while scripts:
        chooser = Outcomes(scripts.pop())
        verdict = walk(tree, logits, sampling, chooser)
        scripts += chooser.branches
        yield chooser.probability, verdict


def draws(q: Tensor, count: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every ordered draw of `count` tokens from q [V] without replacement."""
    for tokens in itertools.permutations(range(len(q)), count):
        probability, left = 1.0, 1.0
        for token in tokens:
            probability *= float(q[token]) / left if left > 1e-15 else 0.0
            left -= float(q[token])
        if probability > 0:
            yield probability, tokens


def joint_distribution(
    parents: tuple[int, ...],
    target_of: dict[tuple[int, ...], Tensor],
    q_of_depth: list[Tensor] | None,
    fixed_tokens: list[int] | None,
    sampling: Sampling,
) -> Tensor:
    """[V, V]: the exact distribution of the first two tokens, later ones being sampled from the target itself."""
    shape = TreeShape.of(parents)
    joint = torch.zeros(V, V, dtype=torch.float64)
    families = [node for node in range(len(shape)) if shape.children[node]]
    if q_of_depth is None:
        assert fixed_tokens is not None
        drawn_trees = [(1.0, fixed_tokens)]
        q_rows = None
    else:
        q_rows = torch.stack([q_of_depth[min(depth, len(q_of_depth) - 1)] for depth in shape.depths])
        drawn_trees = []
        for combination in itertools.product(*(draws(q_rows[node], len(shape.children[node])) for node in families)):
            tokens = [0] * len(shape)
            weight = 1.0
            for node, (probability, values) in zip(families, combination, strict=True):
                weight *= probability
                for child, value in zip(shape.children[node], values, strict=True):
                    tokens[child] = value
            drawn_trees.append((weight, tokens))
    for weight, tokens in drawn_trees:
        tree = DraftTree(tokens, shape, q_rows)
        contexts = [tuple(tokens[step] for step in shape.path_to(node)[1:]) for node in range(len(shape))]
        logits = torch.stack([target_of.get(context, torch.zeros(V).double()) for context in contexts])
        for probability, verdict in every_verdict(tree, logits, sampling):
            committed = [tokens[node] for node in verdict.path[1:]] + [verdict.next_token]
            if len(committed) == 1:
                joint[committed[0]] += weight * probability * sampling.probabilities(target_of[committed[0],])
            else:
                joint[committed[0], committed[1]] += weight * probability
    return joint


TREES = {
    "chain of 1": (-1, 0),
    "chain of 2": (-1, 0, 1),
    "two siblings": (-1, 0, 0),
    "all siblings": (-1, 0, 0, 0, 0),
    "two levels": (-1, 0, 0, 1, 1, 2),
    "three and two": (-1, 0, 0, 0, 2, 2),
}
SAMPLINGS = [Sampling(1.0), Sampling(0.6), Sampling(1.3, top_k=2), Sampling(1.0, top_p=0.7)]


def target_and_draft(seed: int) -> tuple[dict[tuple[int, ...], Tensor], list[Tensor]]:
    """The target's logits after the empty and every one-token context, and the drafter's at two depths."""
    generator = torch.Generator().manual_seed(seed)
    target_of = {(): torch.randn(V, generator=generator, dtype=torch.float64) * 1.5}
    for token in range(V):
        target_of[token,] = torch.randn(V, generator=generator, dtype=torch.float64) * 1.5
    return target_of, list(torch.randn(2, V, generator=generator, dtype=torch.float64) * 1.5)


def wanted_joint(target_of: dict[tuple[int, ...], Tensor], sampling: Sampling) -> Tensor:
    second = torch.stack([sampling.probabilities(target_of[token,]) for token in range(V)])
    return sampling.probabilities(target_of[()])[:, None] * second


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_trees_keep_the_distribution(parents: tuple[int, ...], sampling: Sampling, seed: int) -> None:
    target_of, draft_logits = target_and_draft(seed)
    q_of_depth = [sampling.probabilities(logits) for logits in draft_logits]
    support = min(int((q > 0).sum()) for q in q_of_depth)
    shape = TreeShape.of(parents)
    if max(len(children) for children in shape.children) > support:
        pytest.skip("the builders never draw more siblings than q has tokens")
    joint = joint_distribution(parents, target_of, q_of_depth, None, sampling)
    torch.testing.assert_close(joint, wanted_joint(target_of, sampling), atol=1e-9, rtol=0)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    ("parents", "tokens"),
    [
        ((-1, 0), [0, 2]),
        ((-1, 0, 0, 0), [0, 2, 0, 3]),
        ((-1, 0, 0, 1, 1, 2), [0, 3, 1, 0, 2, 2]),
        ((-1, 0, 0, 0, 0), [0, 0, 1, 2, 3]),
    ],
)
def test_deterministic_trees_keep_the_distribution(
    parents: tuple[int, ...], tokens: list[int], sampling: Sampling
) -> None:
    target_of, _ = target_and_draft(2)
    joint = joint_distribution(parents, target_of, None, tokens, sampling)
    torch.testing.assert_close(joint, wanted_joint(target_of, sampling), atol=1e-9, rtol=0)


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


def test_greedy_follows_the_argmax() -> None:
    tree = DraftTree([9, 1, 2, 3, 0], TreeShape.of((-1, 0, 0, 2, 3)))
    logits = torch.full((5, V), -1.0)
    logits[0, 2] = logits[2, 3] = logits[3, 1] = 5.0
    verdict = verify(tree, logits, Sampling())
    assert (verdict.path, verdict.next_token) == ([0, 2, 3], 1)
    logits[0, 2] = -2.0
    assert verify(tree, logits, Sampling()).path == [0]


def test_the_generator_decides_alone() -> None:
    """Same seed, same verdict: no global randomness."""
    target_of, (draft, _) = target_and_draft(4)
    tree = DraftTree([0, 1, 2], TreeShape.of((-1, 0, 0)), draft.softmax(-1).expand(3, V))
    logits = target_of[()].expand(3, V)
    verdicts = [verify(tree, logits, Sampling(1.0), torch.Generator().manual_seed(5)) for _ in range(3)]
    assert verdicts[0] == verdicts[1] == verdicts[2]


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
