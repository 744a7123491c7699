"""Predictions of theory for a drafter, from its acceptance rate and its cost.

Leviathan et al. (arXiv 2211.17192, section 3) predict the gain of speculative sampling from three numbers: alpha =
acceptance rate, gamma = drafted tokens along a path, c = drafting time over the time of one target step. Their c is
that of one drafted token, so that a round costs gamma * c + 1; a parallel drafter (ParallelSpec, 2410.05589) drafts all
gamma in one forward, so that a round costs c + 1. Both assume that acceptances are independent of one another and that
verification takes no longer than a single step. `theory_row` computes for the report

gamma                the longest path that was drafted
alpha                accepted / tried draft tokens: a position is tried if verification reaches it
c                    drafting time over the time of a target step: of one draft token for a sequential drafter, of the
                     round for a parallel one
tau (equation 1)     expected tokens with this alpha at each round's own depth. A larger measured tau means that
                     acceptances are correlated, as easy text comes in stretches
theorem 3.8          that tau over (gamma c + 1), or over (c + 1)
best gamma           section 3.5; for a parallel drafter, whose c does not grow, `sufficient_gamma`

The theory is about chains. In a tree, a position is tried once, whatever its number of children, and gamma is the
depth.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from draftsmith.eval.decoding.generate import AnswerRecord

MOST_TOKENS = 32  # largest gamma considered


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return E[tokens of a round] = (1 - alpha^(gamma+1)) / (1 - alpha), the target's token included (equation 1)."""
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(f"alpha={alpha} must be in [0, 1] and gamma={gamma} at least 0")
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """Return the expected speedup, E[tokens] / (gamma c + 1) (theorem 3.8)."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def best_gamma(alpha: float, c: float, at_most: int = MOST_TOKENS) -> int:
    """Return the gamma with the largest expected speedup (section 3.5); 0 if drafting does not pay."""
    return max(range(at_most + 1), key=lambda gamma: walltime_factor(alpha, gamma, c))


def sufficient_gamma(alpha: float) -> int:
    """Return the smallest gamma with 99 % of the tokens of infinitely long drafts, for drafters of constant cost.

    Infinite drafts give 1 / (1 - alpha) tokens per round, and gamma draft tokens a share of 1 - alpha^(gamma+1).
    """
    return next((gamma for gamma in range(MOST_TOKENS) if 1 - alpha ** (gamma + 1) >= 0.99), MOST_TOKENS)


def theory_row(turns: list[AnswerRecord], sequential: bool, cost_ratio: float) -> dict[str, Any]:
    """Compute the figures of the module's table, for one method at one temperature.

    Args:
        cost_ratio: Drafting time of a round over the time of a target step.
    """
    depths = [depth for turn in turns for depth in turn.draft_depths]
    tried = sum(turn.tried for turn in turns)
    alpha = sum(turn.accepted_drafts for turn in turns) / tried if tried else 0.0
    gamma, mean_depth = max(depths), statistics.fmean(depths)
    tau = sum(count * expected_tokens(alpha, depth) for depth, count in Counter(depths).items()) / len(depths)
    c = cost_ratio / mean_depth if sequential and mean_depth else cost_ratio
    return {
        "sequential": sequential,
        "gamma": gamma,
        "alpha": alpha,
        "c": c,
        "tau_predicted_iid": tau,
        "speedup_predicted_iid": tau / (cost_ratio + 1),
        "best_gamma": best_gamma(alpha, c) if sequential else sufficient_gamma(alpha),
    }
