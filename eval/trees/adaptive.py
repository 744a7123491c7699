"""How much of a draft to verify, and how deep to draft: as much as promises the most tokens per second.

A tree of the N most confident paths holds the best tree of every smaller size. The tokens that a round of n of them
promises are 1 + the sum of the n probabilities of being accepted; its cost is known (`RoundCosts`). Wanted is the
largest quotient of all tokens and all costs, which is not that of each round: a second is worth the tokens that it
brings elsewhere. So each round takes the n with the most tokens - rate x cost, where `rate` is what all rounds so far
brought (Dinkelbach, 1967: where rate is the best quotient, that difference's best is 0). Where the drafter is sure this
is a large tree, where it is not a small one. A drafter that drafts level by level cuts at every level, and stops where
the next one cannot promise what its forward costs.

Only what the drafter's distribution says decides, before the target has said anything: answers keep theirs. (DSpark's
confidence head is not asked: it makes the estimate of a token worse, see `docs/results/drafters/confidence.json`.)

How often a drafter is right at a given confidence is not what it says. Both are counted while decoding, by the
confidence's order of magnitude: over `FIRST_ROUNDS` of whole trees, then of what is verified, at least one token. What
was seen long ago counts less (`MEMORY`), so that a size once found too large is tried again. (Of a block's length for
many requests at once: SpecDec++, 2405.19715, and DSpark's scheduler.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from draftsmith.eval.trees.verify import DraftTree

BINS = 8  # the k-th: confidence from 2**-k down to 2**-(k+1), the last one all below
PER_NAT = 1 / math.log(2)
FIRST_ROUNDS = 16  # whose trees stay whole: a drafter may be better than it says
MEMORY = 0.98  # of a round's counts, after the next one
PRIOR_ACCEPTED = 4.0  # tokens that would have been accepted, had the drafter's confidence been right


Curve = tuple[tuple[int, float], ...]  # (nodes, root included; time of the target's forward over them), ascending


@dataclass(frozen=True)
class RoundCosts:
    """What a round costs by the number of its tree's nodes, in seconds or any unit of time.

    draft: Of a draft that takes one forward, or of the first level of one that takes a forward a level.
    level: Of each further level; 0 of a draft that takes one forward.
    """

    verify: Curve
    draft: float
    level: float = 0.0

    def of(self, nodes: int, levels: int = 1) -> float:
        """The cost of a round: a draft of `levels` levels, and the verification of `nodes` nodes, root included."""
        return self.draft + (levels - 1) * self.level + self._verify_of[min(nodes, len(self._verify_of)) - 1]

    @cached_property
    def _verify_of(self) -> list[float]:
        """The time of verification by number of nodes, from 1 on; it is read dozens of times a round."""
        return [on_curve(self.verify, nodes) for nodes in range(1, self.verify[-1][0] + 1)]


def on_curve(curve: Curve, nodes: int) -> float:
    """Interpolate between the measured sizes; beyond the largest the time is that one's."""
    sizes, times = zip(*curve, strict=True)
    return float(np.interp(nodes, sizes, times))


def never_falling(curve: Curve) -> Curve:
    """Find the nearest curve, in least squares, on which more nodes never take less time: what dips is noise.

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


class AdaptiveTree:
    """See the module's docstring. Until `costs` are given, trees stay as they are."""

    def __init__(self, costs: RoundCosts | None = None) -> None:
        self.costs = costs
        self._promised = [PRIOR_ACCEPTED] * BINS
        self._accepted = [PRIOR_ACCEPTED] * BINS
        self._share = [1.0] * BINS  # the one over the other: read dozens of times a round
        self._tree: DraftTree | None = None
        self._rounds = 0
        self._tokens, self._spent = 0.0, 0.0  # by all rounds whose costs were known
        self._levels = 0  # drafted in this round, of a drafter that drafts level by level

    @property
    def whole(self) -> bool:
        """Whether trees stay as they are."""
        return self.costs is None or self._rounds < FIRST_ROUNDS

    @property
    def rate(self) -> float:
        """Tokens for a unit of cost, by what was decoded so far and one round in which nothing was accepted."""
        assert self.costs is not None
        return (self._tokens + 1) / (self._spent + self.costs.of(2))

    def probability(self, log_confidence: float) -> float:
        """Estimate the probability that a path is accepted, from what the drafter says of it."""
        accepted = math.exp(log_confidence) * self._share[_bin(log_confidence)]
        return accepted if accepted < 1.0 else 1.0

    def fitting(self, tree: DraftTree) -> DraftTree:
        """Cut a deterministic tree with `log_confidence` to the part that promises most tokens per second."""
        confidence = tree.log_confidence
        if tree.q is not None or confidence is None:
            raise ValueError(
                "only deterministic trees with confidences are cut: a sampled one would be biased by its q"
            )
        # The sort is stable and no child is more confident than its parent, so parents come first.
        order = sorted(range(1, len(tree)), key=confidence.__getitem__, reverse=True)
        size = self._best_size([confidence[node] for node in order])
        self._tree = tree.cut_to(sorted([0, *order[:size]]))
        return self._tree

    def of_level(self, log_confidence: list[float]) -> int:
        """Decide how many of the most confident paths to keep after a level was drafted.

        As long as a further node costs no less than the last, a path that does not pay now does not when more
        confident ones have come: it need not be drafted below.

        Args:
            log_confidence: Of all paths so far, descending.
        """
        self._levels += 1
        return self._best_size(log_confidence)

    def worth_a_level(self, frontier: list[float]) -> bool:
        """Whether to draft below paths of this log confidence: it brings a token at most where they are accepted."""
        if self.whole:
            return True
        assert self.costs is not None
        return sum(map(self.probability, frontier)) > self.rate * self.costs.level

    def _best_size(self, log_confidence: list[float]) -> int:
        """log_confidence: descending."""
        if self.whole:
            return len(log_confidence)
        assert self.costs is not None
        rate = self.rate
        tokens, best, best_size = 0.0, -math.inf, 0
        for size, value in enumerate(log_confidence, start=1):
            tokens += self.probability(value)
            gain = tokens - rate * self.costs.of(size + 1)
            if gain > best:
                best, best_size = gain, size
        return best_size

    def observe(self, committed_ids: list[int]) -> None:
        """Learn from the tokens that the last tree's round committed, the target's own included."""
        tree, self._tree = self._tree, None
        levels, self._levels = max(1, self._levels), 0
        if tree is None:
            return
        assert tree.log_confidence is not None
        self._rounds += 1
        if self.costs is not None:
            self._tokens += len(committed_ids)
            self._spent += self.costs.of(len(tree), levels)
        for number in range(BINS):
            self._promised[number] = PRIOR_ACCEPTED + MEMORY * (self._promised[number] - PRIOR_ACCEPTED)
            self._accepted[number] = PRIOR_ACCEPTED + MEMORY * (self._accepted[number] - PRIOR_ACCEPTED)
        for value in tree.log_confidence[1:]:
            self._promised[_bin(value)] += math.exp(value)
        node = 0
        for token in committed_ids:
            node = next((child for child in tree.children(node) if tree.tokens[child] == token), -1)
            if node < 0:
                break
            self._accepted[_bin(tree.log_confidence[node])] += 1
        self._share = [right / said for right, said in zip(self._accepted, self._promised, strict=True)]


def _bin(log_confidence: float) -> int:
    number = int(-log_confidence * PER_NAT)
    return number if number < BINS else BINS - 1
