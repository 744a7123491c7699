"""What a round costs by the number of its tree's nodes: what `adaptive.py` weighs tokens against."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cached_property

Curve = tuple[tuple[int, float], ...]  # (nodes, root included; time of the target's forward over them), ascending


@dataclass(frozen=True)
class RoundCosts:
    """Seconds, or any unit of time.

    draft: Of a draft that takes one forward, or of the first level of one that takes a forward a level.
    level: Of each further level; 0 of a draft that takes one forward.
    """

    verify: Curve
    draft: float
    level: float = 0.0

    def of(self, nodes: int, levels: int = 1) -> float:
        """Of a round: a draft of so many levels, and the verification of so many nodes, root included."""
        return self.draft + (levels - 1) * self.level + self._verify_of[min(nodes, len(self._verify_of)) - 1]

    @cached_property
    def _verify_of(self) -> list[float]:
        """By number of nodes, from 1 on: read dozens of times a round."""
        return [on_curve(self.verify, nodes) for nodes in range(1, self.verify[-1][0] + 1)]


def never_falling(curve: Curve) -> Curve:
    """The nearest curve, in least squares, on which more nodes never take less time: what dips is noise.

    Pool adjacent violators (Ayer et al., 1955).
    """
    pools: list[tuple[float, int]] = []  # mean, number of sizes
    for _, time in curve:
        pools.append((time, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, few), (high, many) = pools[-2:]
            pools[-2:] = [((low * few + high * many) / (few + many), few + many)]
    means = [mean for mean, count in pools for _ in range(count)]
    return tuple((size, mean) for (size, _), mean in zip(curve, means, strict=True))


def on_curve(curve: Curve, nodes: int) -> float:
    """Linear between the measured sizes; beyond the largest as that one."""
    sizes = [size for size, _ in curve]
    above = bisect.bisect_left(sizes, nodes)
    if above == len(curve):
        return curve[-1][1]
    if sizes[above] == nodes or above == 0:
        return curve[above][1]
    (low, low_s), (high, high_s) = curve[above - 1], curve[above]
    return low_s + (high_s - low_s) * (nodes - low) / (high - low)
