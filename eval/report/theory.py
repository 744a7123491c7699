"""What speculative sampling gains, from three numbers (Leviathan et al., arXiv 2211.17192, section 3).

alpha = acceptance rate, gamma = drafted tokens along a path, c = drafting time over the time of one target step.
Leviathan's c is that of one drafted token, so that a round costs gamma * c + 1; a parallel drafter (ParallelSpec,
2410.05589) drafts all gamma in one forward, so that a round costs c + 1. Both assume that acceptances are independent
of one another and that verification takes no longer than a single step: what is measured beside them says how far.
"""

from __future__ import annotations

MOST_TOKENS = 32  # gammas tried


def expected_tokens(alpha: float, gamma: int) -> float:
    """Equation 1: E[tokens of a round] = (1 - alpha^(gamma+1)) / (1 - alpha), the target's own token included."""
    _check(alpha, gamma)
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def walltime_factor(alpha: float, gamma: int, c: float, parallel: bool = False) -> float:
    """Theorem 3.8: the expected speedup, E[tokens] / (gamma c + 1), or over (c + 1) for a parallel drafter."""
    cost = (c if gamma else 0.0) if parallel else gamma * c
    return expected_tokens(alpha, gamma) / (cost + 1)


def operations_factor(alpha: float, gamma: int, c_operations: float) -> float:
    """Theorem 3.11: arithmetic per token over the target's own, (1-a)(g c' + g + 1) / (1 - a^(g+1)).

    `c_operations`: the drafter's operations for one token over the target's.
    """
    return (gamma * c_operations + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, parallel: bool = False, at_most: int = MOST_TOKENS) -> int:
    """Section 3.5: the gamma of the largest speedup; 0 where drafting does not pay."""
    return max(range(at_most + 1), key=lambda gamma: walltime_factor(alpha, gamma, c, parallel))


def sufficient_gamma(alpha: float, share: float = 0.99, at_most: int = MOST_TOKENS) -> int:
    """For a drafter whose cost does not grow with gamma: the least gamma with `share` of what endless drafts give.

    They give 1 / (1 - alpha) tokens a round, of which gamma drafted tokens give a share of 1 - alpha^(gamma+1).
    """
    _check(alpha, 0)
    return next((gamma for gamma in range(at_most) if 1 - alpha ** (gamma + 1) >= share), at_most)


def _check(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(f"alpha={alpha} must be in [0, 1] and gamma={gamma} at least 0")
