"""Intervals over questions: the figure by hand, coverage where the truth is known, and what pairing takes away."""

import numpy as np
import pytest

from draftsmith.eval.report import bootstrap
from draftsmith.eval.report.bootstrap import QuestionSums


def sums_of(kept: list[float], seconds: list[float]) -> QuestionSums:
    """Ten rounds a question, as many tokens as kept; the baseline's token takes a second."""
    kept_q, ones = np.array(kept), np.ones(len(kept))
    return QuestionSums(kept_q, 10 * ones, kept_q, np.array(seconds), kept_q, kept_q)


def test_figures_are_pooled() -> None:
    sums = sums_of([20.0, 40.0], [10.0, 5.0])
    every = bootstrap.every_question(2)
    assert bootstrap.tau(sums, every).tolist() == [3.0]
    assert bootstrap.speedup(sums, every).tolist() == [60 / 15]
    # Of two questions a resample has the first twice, both, or the second twice: tau 2, 3 or 4.
    assert bootstrap.interval(bootstrap.tau, sums) == [2.0, 4.0]
    assert bootstrap.interval(bootstrap.tau, sums_of([20.0], [1.0])) is None


def test_it_covers_the_truth_as_often_as_it_says() -> None:
    """Questions with a tau of 2 on average, 300 times 40 of them: 95 %, but for chance and the bias of the method."""
    chance, hits = np.random.default_rng(1), 0
    for _ in range(300):
        kept = chance.gamma(4.0, 5.0, size=40)  # mean 20, so a tau of 2
        ends = bootstrap.interval(bootstrap.tau, sums_of(kept.tolist(), kept.tolist()))
        assert ends is not None
        hits += ends[0] <= 2.0 <= ends[1]
    assert 0.90 <= hits / 300 <= 0.98


def test_pairing_takes_the_questions_difficulty_away() -> None:
    """One is 10 % faster on every question, however unlike the questions are."""
    chance = np.random.default_rng(2)
    kept = chance.uniform(10, 60, size=20).tolist()
    slow = sums_of(kept, [each / 2 for each in kept])
    fast = sums_of(kept, [each / 2.2 for each in kept])
    assert bootstrap.paired_ratio(bootstrap.speedup, fast, slow) == pytest.approx([1.1, 1.1])
    longer = sums_of([1.1 * each for each in kept], kept)  # and another keeps 10 % more tokens in each round
    assert bootstrap.paired_ratio(bootstrap.tau, longer, slow) == pytest.approx([1.1, 1.1])
    hard = sums_of(kept, chance.uniform(5, 30, size=20).tolist())
    low, high = bootstrap.paired_ratio(bootstrap.speedup, hard, slow) or [0.0, 0.0]
    assert high - low > 0.1
    with pytest.raises(ValueError, match="20 questions cannot be paired with 2"):
        bootstrap.paired_ratio(bootstrap.tau, slow, sums_of([1.0, 2.0], [1.0, 1.0]))
