"""What followed a path's last tokens where they occurred before, as further candidates of a drafter's tree.

Prompt lookup (Saxena, 2023; LLMA, 2304.04487) for every path of a draft tree instead of the committed tokens alone, and
ranked with what the drafter proposes. A parallel drafter's deeper tokens are drafted without knowledge of those before
them: here that knowledge comes from the text itself, at no forward.

Two estimates of a path's probability meet: the drafter's q, and how often a lookup has been right after so many
matching tokens. That share is learnt while decoding, from `PRIOR` on.

`Memory` is the same over all conversations of a server (suffix decoding, 2411.04975, has a tree of suffixes for it):
what followed the last tokens in an earlier one, where this one says nothing or less.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from typing import NamedTuple

from draftsmith.eval.trees.verify import DraftTree, TreeShape

MAX_NGRAM = 8
# How often the token after the latest occurrence of the longest known n-gram is right, by the n-gram's length: counted
# on 600 conversations of SmolLM2-135M-Instruct at T = 0, 139,564 answer tokens; and, far fewer and made smooth, on
# answers at T = 1, which repeat themselves less. It counts as so many observations.
PRIOR = (0.25, 0.56, 0.65, 0.70, 0.74, 0.78, 0.80, 0.84)
PRIOR_SAMPLED = (0.13, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60, 0.70)
PRIOR_OBSERVATIONS = 8


MEMORY_MIN_NGRAM = 3  # shorter ones say too little across conversations
MEMORY_NGRAMS = 600_000  # by default: of 100,000 tokens


class Found(NamedTuple):
    """The token after the latest occurrence of the longest known n-gram, and that one's length.

    length: `MAX_NGRAM` more where it is of other conversations.
    """

    token: int
    length: int


class Memory:
    """What came after the n-grams of earlier conversations, the newest of them.

    Args:
        most_ngrams: The ones that were not said for longest are forgotten.
    """

    def __init__(self, most_ngrams: int = MEMORY_NGRAMS) -> None:
        self._most_ngrams = most_ngrams
        self._next_of = OrderedDict[tuple[int, ...], int]()  # in the order in which they were said last
        # What finds were worth, by length: of all conversations, since they say much about each other.
        self.tried = [float(PRIOR_OBSERVATIONS)] * MAX_NGRAM
        self.right = [share * PRIOR_OBSERVATIONS for share in PRIOR]

    def __len__(self) -> int:
        return len(self._next_of)

    def add(self, ids: list[int]) -> None:
        """Remember a sequence, a prompt with its answer."""
        for end in range(MEMORY_MIN_NGRAM, len(ids)):
            for length in range(MEMORY_MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                ngram = tuple(ids[end - length : end])
                self._next_of.pop(ngram, None)
                self._next_of[ngram] = ids[end]
        while len(self._next_of) > self._most_ngrams:
            self._next_of.popitem(last=False)  # a plain dict would look for its first item behind all deleted ones

    def find(self, last: tuple[int, ...], shortest: int) -> Found | None:
        """What came after the longest known n-gram at the end of `last`, if it has so many tokens."""
        for length in range(len(last), max(shortest, MEMORY_MIN_NGRAM) - 1, -1):
            token = self._next_of.get(last[len(last) - length :])
            if token is not None:
                return Found(token, MAX_NGRAM + length)
        return None


class PathLookup:
    """The sequence so far, by its n-grams: what came after the last one of each.

    Args:
        temperature: Of the target; from 1 on lookups are held for worth what they are at 1.
        memory: Of other conversations.
    """

    def __init__(self, temperature: float = 0.0, memory: Memory | None = None) -> None:
        self._memory = memory
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
                tried, right, place = self._worth(found.length)
                tried[place] += 1
                right[place] += found.token == token
            self._append(token)

    def find(self, path: list[int]) -> Found | None:
        """Look up what would follow the sequence and these tokens; None where the last of them is new."""
        last = (*self._last, *path)[-MAX_NGRAM:]
        own = None
        for begin in range(len(last)):
            token = self._next_of.get(last[begin:])
            if token is not None:
                own = Found(token, len(last) - begin)
                break
        if self._memory is None:
            return own
        return self._memory.find(last, 0 if own is None else own.length + 1) or own

    def log_probability(self, length: int) -> float:
        """The log probability that a lookup is right, after an n-gram of that length."""
        tried, right, place = self._worth(length)
        return math.log(right[place] / (tried[place] + 1))  # one more wrong one, so that no path is certain

    def _worth(self, length: int) -> tuple[list[float], list[float], int]:
        """The counts, of this conversation or of all, and the place of that length in them."""
        if length <= MAX_NGRAM or self._memory is None:
            return self._tried, self._right, length - 1
        return self._memory.tried, self._memory.right, length - MAX_NGRAM - 1

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
