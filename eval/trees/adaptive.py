"""How much of a draft to verify, and how deep to draft: as much as promises the most tokens per second.

A tree of the N most confident paths holds the best tree of every smaller size. The tokens that a round of n of them
promises are 1 + the sum of the n probabilities of being accepted; its cost is known (`round_costs.py`). Taken is the n
with the largest quotient, each round anew: where the drafter is sure a large tree, where it is not a small one. A
drafter that drafts level by level stops where the next level cannot promise what its forward costs.

Only the drafter's own confidence decides, its distribution's and, where it has one, its confidence head's
(`growers.py`), before the target has said anything: answers keep their distribution.

How often a drafter is right at a given confidence is not what it says. Both are counted while decoding, by the
confidence's order of magnitude: over `FIRST_ROUNDS` of whole trees, then of what is verified, at least one token. What
was seen long ago counts less (`MEMORY`), so that a size once found too large is tried again. (Of a block's length for
many requests at once: SpecDec++, 2405.19715, and DSpark's scheduler.)
"""

from __future__ import annotations

import math

from draftsmith.eval.trees.round_costs import RoundCosts
from draftsmith.eval.trees.tree import DraftTree

BINS = 8  # the k-th: confidence from 2**-k down to 2**-(k+1), the last one all below
FIRST_ROUNDS = 16  # whose trees stay whole: a drafter may be better than it says
MEMORY = 0.98  # of a round's counts, after the next one
PRIOR_ACCEPTED = 4.0  # tokens that would have been accepted, had the drafter's confidence been right


class AdaptiveTree:
    """See the module's docstring. Until `costs` are given, trees stay as they are."""

    def __init__(self, costs: RoundCosts | None = None) -> None:
        self.costs = costs
        self._promised = [PRIOR_ACCEPTED] * BINS
        self._accepted = [PRIOR_ACCEPTED] * BINS
        self._tree: DraftTree | None = None
        self._rounds = 0
        self._levels = 1  # that were drafted of the tree at hand, whether or not they stay

    @property
    def whole(self) -> bool:
        """Whether trees stay as they are."""
        return self.costs is None or self._rounds < FIRST_ROUNDS

    def probability(self, log_confidence: float) -> float:
        """Of a path's being accepted, from what the drafter says of it."""
        number = _bin(log_confidence)
        return min(1.0, math.exp(log_confidence) * self._accepted[number] / self._promised[number])

    def fitting(self, tree: DraftTree) -> DraftTree:
        """The part of the tree that promises most tokens per second. Deterministic trees with `log_confidence`."""
        confidence = tree.log_confidence
        assert confidence is not None
        # The sort is stable and no child is more confident than its parent, so parents come first.
        order = sorted(range(1, len(tree)), key=confidence.__getitem__, reverse=True)
        size = self.best_size([confidence[node] for node in order], self._levels)
        self._tree = tree.cut_to(sorted([0, *order[:size]]))
        return self._tree

    def best_size(self, log_confidence: list[float], levels: int) -> int:
        """How many of the most confident paths to verify, of these; all of them while trees stay whole.

        What does not pay beside these does not beside more confident ones either, as long as a further node costs no
        less than the last: a tree can be cut while it grows.

        Args:
            log_confidence: Descending.
            levels: Drafted so far, at a price that is paid.
        """
        self._levels = levels
        if self.whole:
            return len(log_confidence)
        assert self.costs is not None
        tokens, best, best_size = 1.0, 0.0, 0
        for size, value in enumerate(log_confidence, start=1):
            tokens += self.probability(value)
            rate = tokens / self.costs.of(size + 1, levels)
            if rate > best:
                best, best_size = rate, size
        return best_size

    def worth_a_level(self, kept: list[float], frontier: list[float], levels: int) -> bool:
        """Whether to draft below `frontier`.

        Args:
            kept: Log confidence of the nodes of the tree so far, in any order.
            frontier: Of those that would get children: a further level brings a token at most where they are accepted.
            levels: Drafted so far.
        """
        if self.whole:
            return True
        assert self.costs is not None
        tokens, nodes = 1 + sum(map(self.probability, kept)), len(kept) + 1
        more = sum(map(self.probability, frontier))
        return (tokens + more) / self.costs.of(nodes, levels + 1) > tokens / self.costs.of(nodes, levels)

    def observe(self, committed_ids: list[int]) -> None:
        """The tokens that the last tree's round committed, the target's own included."""
        tree, self._tree = self._tree, None
        if tree is None:
            return
        assert tree.log_confidence is not None
        self._rounds += 1
        for number in range(BINS):
            self._promised[number] = PRIOR_ACCEPTED + MEMORY * (self._promised[number] - PRIOR_ACCEPTED)
            self._accepted[number] = PRIOR_ACCEPTED + MEMORY * (self._accepted[number] - PRIOR_ACCEPTED)
        for value in tree.log_confidence[1:]:
            self._promised[_bin(value)] += math.exp(value)
        node = 0
        for token in committed_ids:
            node = next((child for child in tree.children(node) if tree.tokens[child] == token), -1)
            if node < 0:
                return
            self._accepted[_bin(tree.log_confidence[node])] += 1


def _bin(log_confidence: float) -> int:
    return min(BINS - 1, int(-log_confidence / math.log(2)))
