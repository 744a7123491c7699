"""Lookups add to a draft tree the tokens that followed a path's last tokens earlier in the text.

Prompt lookup (Saxena, 2023; LLMA, 2304.04487) for every path of a draft tree instead of the committed tokens alone,
ranked together with the drafter's candidates. A parallel drafter drafts its deeper tokens without knowing the ones
before them: lookups add that knowledge from the text, without a forward.

Paths are ranked by two estimates of their probability: the drafter's q, and how often lookups after an n-gram of the
same length were right. That share is updated while decoding, starting from `PRIOR`.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from draftsmith.eval.trees.verify import DraftTree, TreeShape

MAX_NGRAM = 8
# How often the token after the latest occurrence of the longest known n-gram is right, by the n-gram's length: counted
# on 600 conversations of SmolLM2-135M-Instruct at T = 0, 139,564 answer tokens; and, on far fewer tokens and smoothed,
# at T = 1, where answers repeat themselves less. Each share counts as `PRIOR_OBSERVATIONS` lookups.
PRIOR = (0.25, 0.56, 0.65, 0.70, 0.74, 0.78, 0.80, 0.84)
PRIOR_SAMPLED = (0.13, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60, 0.70)
PRIOR_OBSERVATIONS = 8


class LookupHit(NamedTuple):
    """Result of a lookup: the token that followed an n-gram at its latest occurrence, and the n-gram's length."""

    token: int
    length: int


class PathLookup:
    """Index of the sequence so far: for every n-gram the token after its latest occurrence.

    Args:
        temperature: The target's sampling temperature, which sets the prior hit rates; above 1 it is treated as 1.
    """

    def __init__(self, temperature: float = 0.0) -> None:
        sampled = min(temperature, 1.0)
        self._prior = [
            (1 - sampled) * greedy + sampled * other for greedy, other in zip(PRIOR, PRIOR_SAMPLED, strict=True)
        ]
        self.start([])

    def start(self, prompt_ids: list[int]) -> None:
        """Start a new sequence with the prompt's tokens, and reset the hit rates to the prior."""
        self._last: tuple[int, ...] = ()  # tokens, MAX_NGRAM at most
        self._next_token: dict[tuple[int, ...], int] = {}
        self._tried = [float(PRIOR_OBSERVATIONS)] * MAX_NGRAM
        self._right = [share * PRIOR_OBSERVATIONS for share in self._prior]
        for token in prompt_ids:
            self._append(token)

    def observe(self, committed_ids: list[int]) -> None:
        """Append tokens of the answer, and count how often lookups would have predicted them."""
        for token in committed_ids:
            hit = self.find([])
            if hit is not None:
                self._tried[hit.length - 1] += 1
                self._right[hit.length - 1] += hit.token == token
            self._append(token)

    def find(self, path: list[int]) -> LookupHit | None:
        """Look up the token after the sequence followed by `path`; None if their last token has not occurred before."""
        last = (*self._last, *path)[-MAX_NGRAM:]
        known, most = 0, len(last)  # all endings of a known n-gram are known
        while known < most:
            length = (known + most + 1) // 2
            known, most = (length, most) if last[-length:] in self._next_token else (known, length - 1)
        return LookupHit(self._next_token[last[-known:]], known) if known else None

    def log_probability(self, length: int) -> float:
        """Return the log of the estimated probability that a lookup after an n-gram of this length is right."""
        # One additional wrong lookup is counted, so that no path has probability 1.
        return math.log(self._right[length - 1] / (self._tried[length - 1] + 1))

    def _append(self, token: int) -> None:
        last = self._last
        for begin in range(len(last)):
            self._next_token[last[begin:]] = token
        self._last = (*last, token)[-MAX_NGRAM:]


def with_lookups(tree: DraftTree, lookup: PathLookup, nodes: int) -> DraftTree:
    """Return the tree of the `nodes` most likely paths among those of `tree` and those that lookups add.

    Args:
        tree: A deterministic tree with `log_confidence`: the drafter's most likely paths.
        nodes: Largest number of nodes of the result, the root not counted.

    Raises:
        ValueError: The tree's tokens were sampled: adding or removing nodes would change their distribution.
    """
    if tree.q is not None or tree.log_confidence is None:
        raise ValueError("lookups need a deterministic tree with log_confidence, not a sampled one")
    tokens, parents, log_confidence = [tree.tokens[0]], [-1], [0.0]
    paths: list[list[int]] = [[]]
    # A path is at most as likely as the one that it continues, so the best candidates are met in order. Entries:
    # (-log probability of the path, order of arrival, parent here, token, node of the drafter's tree or -1).
    heap: list[tuple[float, int, int, int, int]] = []
    arrivals = 0
    place, source = 0, 0
    while len(tokens) <= nodes:
        hit = lookup.find(paths[place])
        children = () if source < 0 else tree.children(source)
        hit_log = -math.inf if hit is None else lookup.log_probability(hit.length)
        for child in children:
            edge = tree.log_confidence[child] - tree.log_confidence[source]
            if hit is not None and tree.tokens[child] == hit.token:
                edge, hit = max(edge, hit_log), None
            heapq.heappush(heap, (-log_confidence[place] - edge, arrivals, place, tree.tokens[child], child))
            arrivals += 1
        if hit is not None:
            heapq.heappush(heap, (-log_confidence[place] - hit_log, arrivals, place, hit.token, -1))
            arrivals += 1
        if not heap:
            break
        cost, _, parent, token, source = heapq.heappop(heap)
        place = len(tokens)
        tokens.append(token)
        parents.append(parent)
        log_confidence.append(-cost)
        paths.append([*paths[parent], token])
    return DraftTree(tokens, TreeShape.of(tuple(parents)), log_confidence=log_confidence)
