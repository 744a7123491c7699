"""What followed a path's last tokens where they occurred before, as further candidates of a drafter's tree.

Prompt lookup (Saxena, 2023; LLMA, 2304.04487) for every path of a draft tree instead of the committed tokens alone, and
ranked with what the drafter proposes. A parallel drafter's deeper tokens are drafted without knowledge of those before
them: here that knowledge comes from the text itself, at no forward.

Two estimates of a path's probability meet: the drafter's q, and how often a lookup has been right after so many
matching tokens. That share is learnt while decoding, from `PRIOR` on.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from draftsmith.eval.trees.verify import DraftTree, TreeShape

MAX_NGRAM = 8
# How often the token after the latest occurrence of the longest known n-gram is right, by the n-gram's length: counted
# on 600 conversations of SmolLM2-135M-Instruct at T = 0, 139,564 answer tokens; and, far fewer and made smooth, on
# answers at T = 1, which repeat themselves less. It counts as so many observations.
PRIOR = (0.25, 0.56, 0.65, 0.70, 0.74, 0.78, 0.80, 0.84)
PRIOR_SAMPLED = (0.13, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60, 0.70)
PRIOR_OBSERVATIONS = 8


class Found(NamedTuple):
    """The token after the latest occurrence of the longest known n-gram, and the n-gram's length."""

    token: int
    length: int


class PathLookup:
    """The sequence so far, by its n-grams: what came after the last one of each.

    Args:
        temperature: Of the target; from 1 on lookups are held for worth what they are at 1.
    """

    def __init__(self, temperature: float = 0.0) -> None:
        sampled = min(temperature, 1.0)
        self._prior = [
            (1 - sampled) * greedy + sampled * other for greedy, other in zip(PRIOR, PRIOR_SAMPLED, strict=True)
        ]
        self.start([])

    def start(self, prompt_ids: list[int]) -> None:
        """Begin a sequence. What lookups were worth in another says little about it."""
        self._last: tuple[int, ...] = ()  # tokens, MAX_NGRAM at most
        self._next_of: dict[tuple[int, ...], int] = {}
        self._tried = [float(PRIOR_OBSERVATIONS)] * MAX_NGRAM
        self._right = [share * PRIOR_OBSERVATIONS for share in self._prior]
        for token in prompt_ids:
            self._append(token)

    def observe(self, committed_ids: list[int]) -> None:
        """Go on with tokens of the answer, and see what lookups would have said of them."""
        for token in committed_ids:
            found = self.find([])
            if found is not None:
                self._tried[found.length - 1] += 1
                self._right[found.length - 1] += found.token == token
            self._append(token)

    def find(self, path: list[int]) -> Found | None:
        """Look up what would follow the sequence and these tokens; None where the last of them is new."""
        last = (*self._last, *path)[-MAX_NGRAM:]
        for begin in range(len(last)):
            token = self._next_of.get(last[begin:])
            if token is not None:
                return Found(token, len(last) - begin)
        return None

    def log_probability(self, length: int) -> float:
        """Return the log probability that a lookup after an n-gram of this length is right."""
        # One more wrong lookup is counted, so that no path is certain.
        return math.log(self._right[length - 1] / (self._tried[length - 1] + 1))

    def _append(self, token: int) -> None:
        last = self._last
        for begin in range(len(last)):
            self._next_of[last[begin:]] = token
        self._last = (*last, token)[-MAX_NGRAM:]


def with_lookups(tree: DraftTree, lookup: PathLookup, nodes: int) -> DraftTree:
    """Keep the `nodes` most likely paths among the tree's and those that lookups continue, the root not counted.

    Args:
        tree: Deterministic, with `log_confidence`: the drafter's most likely paths, `nodes` or more of them.

    Raises:
        ValueError: The tree's tokens were sampled: one that is cut or continued by its own q is biased.
    """
    if tree.q is not None or tree.log_confidence is None:
        raise ValueError("lookups continue deterministic trees with confidences, not sampled ones")
    tokens, parents, log_confidence = [tree.tokens[0]], [-1], [0.0]
    paths: list[list[int]] = [[]]
    # A path is at most as likely as the one that it continues, so the best candidates are met in order. Entries:
    # (-log probability of the path, order of arrival, parent here, token, node of the drafter's tree or -1).
    heap: list[tuple[float, int, int, int, int]] = []
    arrivals = 0
    place, source = 0, 0
    while True:
        found = lookup.find(paths[place])
        children = () if source < 0 else tree.children(source)
        found_log = -math.inf if found is None else lookup.log_probability(found.length)
        for child in children:
            edge = tree.log_confidence[child] - tree.log_confidence[source]
            if found is not None and tree.tokens[child] == found.token:
                edge, found = max(edge, found_log), None
            heapq.heappush(heap, (-log_confidence[place] - edge, arrivals, place, tree.tokens[child], child))
            arrivals += 1
        if found is not None:
            heapq.heappush(heap, (-log_confidence[place] - found_log, arrivals, place, found.token, -1))
            arrivals += 1
        if not heap or len(tokens) > nodes:
            break
        cost, _, parent, token, source = heapq.heappop(heap)
        place = len(tokens)
        tokens.append(token)
        parents.append(parent)
        log_confidence.append(-cost)
        paths.append([*paths[parent], token])
    return DraftTree(tokens, TreeShape.of(tuple(parents)), log_confidence=log_confidence)
