"""Intervals over questions: figures by hand, coverage of a known truth, and the effect of pairing."""

import numpy as np
import pytest

from draftsmith.eval.report.bootstrap import QuestionSums, compute_ratio, interval, speedup, tau


def build_sums(kept: list[float], seconds: list[float], tasks: tuple[str, ...] | None = None) -> QuestionSums:
    """Build sums of ten rounds per question with `kept` tokens; a baseline token takes a second."""
    kept_q, ones = np.array(kept), np.ones(len(kept))
    return QuestionSums(kept_q, 10 * ones, kept_q, np.array(seconds), kept_q, kept_q, tasks)


def test_figures_are_pooled_or_a_mean_over_tasks() -> None:
    sums = build_sums([20.0, 40.0, 60.0], [10.0, 5.0, 15.0])
    assert (compute_ratio(tau, sums), compute_ratio(speedup, sums)) == (pytest.approx(4.0), pytest.approx(120 / 30))
    by_task = build_sums([20.0, 40.0, 60.0], [10.0, 5.0, 15.0], ("rag", "rag", "qa"))
    assert compute_ratio(tau, by_task) == pytest.approx((3.0 + 6.0) / 2)
    assert compute_ratio(speedup, by_task) == pytest.approx((60 / 15 + 60 / 15) / 2)


def test_too_few_questions_have_no_interval() -> None:
    assert interval(tau, build_sums([20.0] * 4, [1.0] * 4)) is None
    assert interval(tau, build_sums([20.0] * 5, [1.0] * 5, ("rag", "rag", "qa", "qa", "mt_bench"))) is None
    assert interval(tau, build_sums([20.0] * 5, [1.0] * 5)) == pytest.approx([2.0, 2.0])


def test_interval_of_tau_begins_at_1_or_above() -> None:
    sums = build_sums([10.0] * 9 + [15.0], [10.0] * 9 + [40.0])
    lows = [ends[0] for ends in (interval(tau, sums), interval(speedup, sums)) if ends is not None]
    assert lows[0] == 1.0 > lows[1]


@pytest.mark.parametrize("tasks", [None, ("rag",) * 7 + ("qa",) * 6], ids=["pooled", "by task"])
def test_interval_has_nominal_coverage(tasks: tuple[str, ...] | None) -> None:
    """400 samples of 13 questions with a mean tau of 2. The percentile bootstrap covered only 90 %."""
    chance, hits = np.random.default_rng(1), 0
    for _ in range(400):
        kept = chance.gamma(4.0, 5.0, size=13)  # mean 20, so a tau of 2
        ends = interval(tau, build_sums(kept.tolist(), kept.tolist(), tasks))
        assert ends is not None
        hits += ends[0] <= 2.0 <= ends[1]
    assert 0.925 <= hits / 400 <= 0.975
