"""Adaptive trees: choose the size and depth of every draft for the most expected tokens per second.

A tree of the N most confident paths holds the best tree of every smaller size. A round with n nodes is expected to
commit 1 + the sum of their n acceptance probabilities; its cost is known (`RoundCosts`). The goal is the largest ratio
of all tokens to all costs, which is not the largest ratio in each round: a second is worth the tokens that it would
give in other rounds. So each round takes the n with the largest tokens - rate x cost, where `rate` is the tokens per
cost of all rounds so far (Dinkelbach, 1967: if rate is the best ratio, the largest difference is 0). If the drafter is
confident this is a large tree, otherwise a small one. A drafter that drafts level by level cuts the tree at every
level, and stops if the next level's expected gain is below its cost.

Only the drafter's distribution decides, before the target has verified anything, so the answers' distribution is not
changed. (DSpark's confidence head is not used: it makes the estimate of a token worse, see
`docs/results/drafters/confidence.json`.)

A drafter's confidence differs from its acceptance rate. Both are summed while decoding, in bins by the confidence's
order of magnitude: over `FIRST_ROUNDS` of whole trees, then over the verified nodes, at least one per round. Older
rounds count less (`MEMORY`), so that a size once found too large is tried again. (For a block's length with many
concurrent requests: SpecDec++, 2405.19715, and DSpark's scheduler.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from draftsmith.eval.trees.verify import DraftTree

BINS = 8  # bin k: confidence from 2**-k down to 2**-(k+1); the last bin also holds all lower ones
PER_NAT = 1 / math.log(2)
FIRST_ROUNDS = 16  # rounds whose trees are not cut: a drafter may be better than its confidence
MEMORY = 0.98  # factor of the earlier counts in every round
PRIOR_ACCEPTED = 4.0  # prior counts in each bin: as many accepted tokens as the confidence promised


Curve = tuple[tuple[int, float], ...]  # (nodes, root included; time of the target's forward over them), ascending


@dataclass(frozen=True)
class RoundCosts:
    """Cost of a round by the number of its tree's nodes, in seconds or any unit of time.

    verify: cost of verification by number of nodes. draft: cost of a draft in one forward, or of the first level of a
    draft level by level. level: cost of each further level; 0 for a draft in one forward.
    """

    verify: Curve
    draft: float
    level: float = 0.0

    def of(self, nodes: int, levels: int = 1) -> float:
        """Return the cost of a round: a draft of `levels` levels, and verification of `nodes` nodes with the root."""
        return self.draft + (levels - 1) * self.level + self._verify_costs[min(nodes, len(self._verify_costs)) - 1]

    @cached_property
    def _verify_costs(self) -> list[float]:
        """Return the cost of verification by number of nodes from 1 on, between measured sizes interpolated.

        Cached, as a round reads it dozens of times.
        """
        sizes, times = zip(*self.verify, strict=True)
        costs: list[float] = np.interp(range(1, sizes[-1] + 1), sizes, times).tolist()
        return costs


def isotonic_fit(curve: Curve) -> Curve:
    """Return the least-squares nearest curve on which more nodes never take less time, as dips are noise.

    Isotonic regression by pooling adjacent violators (Ayer et al., 1955).
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
    """Adaptive size of one drafter's trees, see the module's docstring. Without `costs` trees are not cut."""

    def __init__(self, costs: RoundCosts | None = None) -> None:
        self.costs = costs
        self._promised = [PRIOR_ACCEPTED] * BINS
        self._accepted = [PRIOR_ACCEPTED] * BINS
        self._share = [1.0] * BINS  # accepted / promised; cached, as it is read dozens of times per round
        self._rounds = 0
        self._tokens, self._spent = 0.0, 0.0  # tokens and cost of all rounds since `costs` were set
        self.start()

    def start(self) -> None:
        """Begin a sequence: forget the last round, which `observe` was not called for if it ended an answer."""
        self._tree: DraftTree | None = None
        self._levels = 0  # levels drafted in this round, level by level

    @property
    def keeps_whole_trees(self) -> bool:
        """Return whether trees are not cut yet."""
        return self.costs is None or self._rounds < FIRST_ROUNDS

    @property
    def rate(self) -> float:
        """Return tokens per unit of cost over all rounds so far, and an assumed round in which nothing was accepted."""
        assert self.costs is not None
        return (self._tokens + 1) / (self._spent + self.costs.of(2))

    def probability(self, log_confidence: float) -> float:
        """Estimate the probability that a path is accepted from the drafter's log confidence."""
        accepted = math.exp(log_confidence) * self._share[_bin(log_confidence)]
        return accepted if accepted < 1.0 else 1.0

    def cut(self, tree: DraftTree) -> DraftTree:
        """Cut a deterministic tree with `log_confidence` to the part with the most expected tokens per second."""
        confidence = tree.log_confidence
        if tree.q is not None or confidence is None:
            raise ValueError(
                "only deterministic trees with confidences can be cut: a sampled one would be biased by its q"
            )
        # The sort is stable and no child is more confident than its parent, so parents come first.
        order = sorted(range(1, len(tree)), key=confidence.__getitem__, reverse=True)
        size = self._best_size([confidence[node] for node in order])
        self._tree = tree.cut_to(sorted([0, *order[:size]]))
        return self._tree

    def num_worth_keeping(self, log_confidence: list[float]) -> int:
        """Return how many of the most confident paths to keep after a level was drafted.

        If each further node costs at least as much as the one before, a path that does not pay now does not pay after
        more confident ones were added either, so nothing need be drafted below it.

        Args:
            log_confidence: Log confidence of all paths so far, descending.
        """
        self._levels += 1
        return self._best_size(log_confidence)

    def level_pays_off(self, frontier: list[float]) -> bool:
        """Return whether drafting another level below paths of this log confidence pays.

        It adds at most one token, if one of these paths is accepted.
        """
        if self.keeps_whole_trees:
            return True
        assert self.costs is not None
        return sum(map(self.probability, frontier)) > self.rate * self.costs.level

    def _best_size(self, log_confidence: list[float]) -> int:
        """Return the number of paths with the largest tokens - rate x cost; `log_confidence` is descending."""
        if self.keeps_whole_trees:
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
        """Update the counts with the tokens that the last tree's round committed, the target's own included."""
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
        self._share = [right / promised for right, promised in zip(self._accepted, self._promised, strict=True)]


def _bin(log_confidence: float) -> int:
    number = int(-log_confidence * PER_NAT)
    return number if number < BINS else BINS - 1
