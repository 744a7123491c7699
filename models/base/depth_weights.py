"""How much each depth counts in a drafter's loss, and when: `depth_weights` and `depth_ramp` of `drafter.options`.

With equal weights from the first step on, the easy part of the deep depths (their marginals) drowns the hard part of
the first one (copying), which forms late. With a ramp training begins with depth 1 alone and lets the others in one
after the other. It is a function of progress alone, so a run that goes on from a checkpoint goes on in it.
"""

from collections.abc import Sequence


def depth_shares(weights: Sequence[float], ramp_frac: float = 0.0, progress_frac: float = 1.0) -> list[float]:
    """Share of each depth in the loss, sum 1: lambda_j s**j, normalised, s rising linearly from 0 to 1.

    With lambda_j = d**j this is (d s)**j: the decay itself goes from 0 to d.

    Args:
        weights: lambda_j > 0 of each depth, from the first (j = 0).
        ramp_frac: Share of the training in which s reaches 1; 0 for s = 1 throughout.
        progress_frac: Share of the optimiser steps that are done.
    """
    s = 1.0 if progress_frac >= ramp_frac else progress_frac / ramp_frac
    ramped = [weight * s**j for j, weight in enumerate(weights)]
    return [weight / sum(ramped) for weight in ramped]
