"""Measurement of a round's costs on this machine, before anything else is timed: `adaptive.RoundCosts`.

The cost of a draft is that of its forwards; the cost of verification is that of the target's forward, by its number of
nodes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

from draftsmith.eval.bench.measured_methods import Arm
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import TreeDrafter, build_tree_drafter
from draftsmith.eval.trees.adaptive import Curve, RoundCosts, isotonic_fit
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.decoding.decoders import SequenceDecoder, StepwiseDecoder
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

SIZES = (2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48)  # nodes without the root
TIMED_FORWARDS = 30
DRAFTED_TOKENS = 64  # at most, of the answer whose drafts are timed


def measure_round_costs(session: TargetSession, methods: Sequence[Arm], prompt: list[int]) -> None:
    """Measure the round costs for adaptive methods that do not have them yet; see `MeasuredCosts`."""
    costs = MeasuredCosts(session, prompt)
    for measured in methods:
        session.read_layers(measured.feature_layers)
        costs.set_costs(measured.method)


class MeasuredCosts:
    """Costs of rounds after a prompt, measured when they are first needed; the session's KV cache is overwritten.

    Args:
        prompt: Token ids, of which as many are read as fill half of the session.
    """

    def __init__(self, session: TargetSession, prompt: list[int]) -> None:
        # Half of the session remains for the answer whose drafts are timed.
        self._session, self._prompt = session, prompt[: max(1, session.max_length_tokens // 2)]
        self._by_decoder = WeakKeyDictionary[SequenceDecoder, RoundCosts]()

    @cached_property
    def curve(self) -> Curve:
        """Return the seconds of a verification forward by number of nodes."""
        return verify_curve(self._session, self._prompt)

    def set_costs(self, method: Method) -> None:
        """Set the costs of an adaptive method that has none yet.

        The session must read the feature layers of its drafter.
        """
        if not isinstance(method, TreeDrafter) or method.adaptive is None or method.adaptive.costs is not None:
            return
        decoder = method.decoder
        if decoder not in self._by_decoder:
            self._by_decoder[decoder] = self._round_costs(decoder)
        method.adaptive.costs = self._by_decoder[decoder]

    def _round_costs(self, decoder: SequenceDecoder) -> RoundCosts:
        """Measure the cost of a draft, and of each further level if it is drafted level by level."""
        new_tokens = min(DRAFTED_TOKENS, self._session.max_length_tokens - len(self._prompt))

        def seconds(depth: int | None) -> float:
            return draft_seconds(self._session, decoder, depth, self._prompt, new_tokens)

        if not isinstance(decoder, StepwiseDecoder) or decoder.num_depths == 1:
            return RoundCosts(self.curve, seconds(None))
        shallow, deep = seconds(1), seconds(decoder.num_depths)
        return RoundCosts(self.curve, shallow, max(0.0, deep - shallow) / (decoder.num_depths - 1))


def verify_curve(session: TargetSession, prompt: list[int]) -> Curve:
    """Measure verification for each size of tree, in turns.

    Returns:
        (number of nodes with the root, median seconds of a forward over that many nodes), ascending, never falling.
    """
    sizes = [1, *(size + 1 for size in SIZES)]
    session.prefill(prompt)
    trees = {size: DraftTree([prompt[-1]] * size, bushy(size)) for size in sizes}
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(TIMED_FORWARDS + 3):
        for size, tree in reversed(trees.items()):  # a session of one size compiles that of the largest alone
            started = time.perf_counter()
            session.forward_tree(tree)
            session.synchronize()
            if turn >= 3:
                times[size].append(time.perf_counter() - started)
    return isotonic_fit(tuple((size, statistics.median(times[size])) for size in sizes))


def bushy(size: int) -> TreeShape:
    """Return a tree of `size` nodes with the root, with two children per node."""
    return TreeShape.of((-1, *((node - 1) // 2 for node in range(1, size))))


def draft_seconds(
    session: TargetSession, decoder: SequenceDecoder, depth: int | None, prompt: list[int], new_tokens: int
) -> float:
    """Measure the mean seconds of a draft of `depth` depths (None: all), over an answer's rounds after the first."""
    recipe = MethodConfig(name="x", tree="best_first", nodes=12, branch=4, max_depth=depth)
    out = generate(session, build_tree_drafter(recipe, decoder, Sampling()), prompt, Sampling(), new_tokens)
    return out.usual_draft_s / max(1, out.rounds)
