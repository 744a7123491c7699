"""Leviathan's formulas against the paper's own figures, and against simulation."""

import random

import pytest

from draftsmith.eval.bench.theory import (
    best_gamma,
    expected_tokens,
    operations_factor,
    sufficient_gamma,
    walltime_factor,
)


# arXiv 2211.17192, table 1: operations and speed for alpha, gamma with c = c' = 0.
@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 10, 1.60, 6.86)],
)
def test_table_1_of_the_paper(alpha: float, gamma: int, operations: float, speed: float) -> None:
    assert walltime_factor(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.005)
    assert operations_factor(alpha, gamma, 0.0) == pytest.approx(operations, abs=0.005)


# Table 2: T5-XXL with T5-small (c = 0.02), the walltime improvements that theory expects, in table 4's last column.
def test_expected_improvement_of_table_4() -> None:
    assert walltime_factor(0.75, 7, 0.02) == pytest.approx(3.2, abs=0.05)
    assert walltime_factor(0.62, 7, 0.02) == pytest.approx(2.3, abs=0.05)


def test_equation_1_by_simulation() -> None:
    rng, alpha, gamma, rounds = random.Random(0), 0.7, 4, 40_000
    lengths = []
    for _ in range(rounds):
        length = 0
        while length < gamma and rng.random() < alpha:
            length += 1
        lengths.append(length)
    assert 1 + sum(lengths) / rounds == pytest.approx(expected_tokens(alpha, gamma), abs=0.02)


def test_a_parallel_drafter_pays_once() -> None:
    assert walltime_factor(0.8, 4, 0.2) == pytest.approx(expected_tokens(0.8, 4) / 1.8)
    assert walltime_factor(0.8, 4, 0.2, parallel=True) == pytest.approx(expected_tokens(0.8, 4) / 1.2)
    assert walltime_factor(0.8, 0, 0.2, parallel=True) == 1.0


def test_best_gamma() -> None:
    """Brute force by hand at alpha .5, c .1: 1, 1.364, 1.458, 1.442 for gamma 0..3."""
    assert best_gamma(0.5, 0.1) == 2
    assert best_gamma(0.3, 0.5) == 0
    assert best_gamma(0.5, 0.1, parallel=True, at_most=9) == 9


def test_sufficient_gamma() -> None:
    """.5^7 = .0078 is the first power below .01, so gamma = 6; with nothing accepted none is needed."""
    assert sufficient_gamma(0.5) == 6
    assert sufficient_gamma(0.5, share=0.5) == 0
    assert sufficient_gamma(0.0) == 0
    assert sufficient_gamma(1.0, at_most=32) == 32


def test_limits() -> None:
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1
    with pytest.raises(ValueError, match=r"alpha=1\.5"):
        expected_tokens(1.5, 2)
