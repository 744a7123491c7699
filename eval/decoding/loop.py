"""The loop: draft, verify, commit. One for every method, the autoregressive baseline included.

On a GPU a tree stays there until it has been verified, all nodes at once: the host waits once a round, for one copy of
what was drafted and decided, and sends one back, of what was committed. On a CPU, where nothing waits, verification
walks from node to node and looks only at those on its path.

The first token comes from the prefill and belongs to no round. Tokens behind an end token, behind the one that
completes a stop string, or beyond the limit are cut and count nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.decoding.answer import AnswerRecord
from draftsmith.eval.decoding.method import DraftsColumns, DraftsOnDevice, Method, ReadsLogits
from draftsmith.eval.decoding.phase_clock import PhaseClock, phase_clock
from draftsmith.eval.decoding.session import TargetSession, TargetStep
from draftsmith.eval.decoding.stop_strings import StopStrings
from draftsmith.eval.trees.device_tree import DeviceTree
from draftsmith.eval.trees.sampling import Sampling, first_token
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.eval.trees.verify import Verdict, verify
from draftsmith.eval.trees.verify_at_once import Decided, verify_at_once
from draftsmith.models.decoding.token_columns import ALL_TOKENS
from draftsmith.models.decoding.transfers import to_device


@dataclass(slots=True)
class Round:
    """What a round came to, for `generate`'s `on_round`.

    logits: [N, V] of the target at the tree's nodes; kept: how many of the committed tokens, those of the accepted
    path's nodes and the target's own, belong to the answer. The i-th of them was decided at the path's i-th node.
    """

    tree: DraftTree
    logits: Tensor
    verdict: Verdict
    kept: int


@torch.inference_mode()
def generate(
    session: TargetSession,
    method: Method,
    prompt_ids: list[int],
    sampling: Sampling,
    max_new_tokens: int,
    end_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
    stop: StopStrings | None = None,
    lenience: float = 1.0,
    on_round: Callable[[Round], None] | None = None,
    at_once: bool | None = None,
) -> AnswerRecord:
    """Answer a prompt. Greedy answers are exactly the target's; sampled ones have exactly its distribution.

    Neither holds with a lenience below 1, see `draftsmith.eval.trees.verify`.

    Args:
        on_round: Told of every round at its end; what it takes counts to the commit.
        at_once: Whether all nodes are verified at once, by default on a GPU; with a lenience they never are.

    Raises:
        UserError: Prompt and answer do not fit into the session.
    """
    session.check_room(prompt_ids, max_new_tokens)
    at_once = lenience == 1 and (session.device.type == "cuda" if at_once is None else at_once)
    clock = phase_clock(session.device)
    answer = OpenAnswer(method, generator, sampling, max_new_tokens, end_ids, stop)
    answer.begin(session.prefill, prompt_ids)
    out = answer.record
    clock.mark()
    while not answer.ended:
        if at_once:
            _device_round(session, answer, clock, on_round)
        else:
            _walked_round(session, answer, clock, lenience, on_round)
    session.synchronize()
    out.wall_time_s = time.perf_counter() - answer.began_s
    marks = clock.seconds()
    for first in range(0, len(marks) - 1, 4):
        out.add_round_s(*marks[first : first + 5])
    return out


def _walked_round(
    session: TargetSession,
    answer: OpenAnswer,
    clock: PhaseClock,
    lenience: float,
    on_round: Callable[[Round], None] | None,
) -> None:
    # 1. Draft.
    tree = answer.propose()
    clock.mark()
    # 2. Verify all nodes in one forward.
    step = session.forward_tree(tree)
    session.synchronize()
    clock.mark()
    verdict = verify(tree, step.logits, answer.sampling, answer.generator, lenience)
    answer.show_logits(tree, step.logits)
    clock.mark()
    # 3. Commit the accepted path and the target's own token.
    session.commit(verdict.path)
    kept = answer.commit(tree, verdict, step.features)
    if on_round is not None:
        on_round(Round(tree, step.logits, verdict, kept))
    clock.mark()


def _device_round(
    session: TargetSession, answer: OpenAnswer, clock: PhaseClock, on_round: Callable[[Round], None] | None
) -> None:
    """The same steps, of which the host waits for the one copy after the second."""
    tree = answer.propose_on_device(session.device)
    clock.mark()
    step = session.forward_device_tree(tree)
    clock.mark()
    decided = verify_at_once(tree, step.logits, answer.sampling, answer.generator)
    answer.show_logits(decided.tree, step.logits)
    clock.mark()
    kept = answer.commit_on_device(session, decided, step.features)
    if on_round is not None:
        if tree.log_confidence is not None:
            confidence = tree.log_confidence.tolist()
            decided.tree.log_confidence = [confidence[node] for node in decided.nodes]
        logits = step.logits if len(decided.nodes) == len(tree) else step.logits[decided.nodes]
        on_round(Round(decided.tree, logits, decided.verdict, kept))
    clock.mark()


class OpenAnswer:
    """An answer that is being generated: what the loops for one and for many sequences do with each of them.

    Args:
        generator: Of the answer's first token; the method has its own.
    """

    def __init__(
        self,
        method: Method,
        generator: torch.Generator | None,
        sampling: Sampling,
        max_new_tokens: int,
        end_ids: Collection[int],
        stop: StopStrings | None,
    ) -> None:
        self.method, self.generator, self.sampling = method, generator, sampling
        self.record = AnswerRecord()
        self.ended = False
        self._reader = method if isinstance(method, ReadsLogits) else None
        self._device_method = method if isinstance(method, DraftsOnDevice) else None
        self._columns = method.columns if isinstance(method, DraftsColumns) else ALL_TOKENS
        if self._columns.reduced:
            self.record.outside_tokens, self.record.ended_outside = 0, []
        self._max_new_tokens, self._end_ids = max_new_tokens, end_ids
        self._matcher = None if stop is None else stop.matcher()

    def begin(self, prefill: Callable[[list[int]], TargetStep], prompt_ids: list[int]) -> None:
        """Read the prompt; its first token comes from the target alone."""
        self.began_s = time.perf_counter()
        step = prefill(prompt_ids)
        first = first_token(step.logits[-1], self.sampling, self.generator)
        self.record.first_token_s = time.perf_counter() - self.began_s
        self.method.start(prompt_ids, step.features)
        self.method.observe([first], step.features[-1:])
        self.record.prefill_s = time.perf_counter() - self.began_s
        self._keep([first])

    def propose(self) -> DraftTree:
        """What is deeper than the tokens that are still wanted could not be kept."""
        return self.method.propose().cut_to_depth(self._max_new_tokens - len(self.record.ids) - 1)

    def propose_on_device(self, device: torch.device) -> DeviceTree:
        """The same, on the device whoever made it."""
        method, depth = self._device_method, self._max_new_tokens - len(self.record.ids) - 1
        tree = self.method.propose() if method is None else method.propose_on_device()
        cut = tree.cut_to_depth(depth)
        return cut if isinstance(cut, DeviceTree) else DeviceTree.of(cut, device)

    def show_logits(self, tree: DraftTree, logits: Tensor) -> None:
        """logits: [N, V]."""
        if self._reader is not None:
            self._reader.read_logits(tree, logits)

    def commit(self, tree: DraftTree, verdict: Verdict, features: Tensor) -> int:
        """Write down what a round has committed, and tell the method; how many tokens belong to the answer.

        Args:
            features: [N, F] at the tree's nodes, or more.
        """
        path, committed = verdict.path, _committed(tree, verdict)
        kept = self._note_round(tree, verdict, committed)
        if not self.ended:
            features = features[: len(path)] if path[-1] == len(path) - 1 else features[path]
            self.method.observe(committed, features)
        return kept

    def commit_on_device(self, session: TargetSession, decided: Decided, features: Tensor) -> int:
        """The same with one copy to the device, the session's commit included."""
        method, places, committed = self._device_method, decided.places, _committed(decided.tree, decided.verdict)
        kept = self._note_round(decided.tree, decided.verdict, committed)
        is_prefix = places[-1] == len(places) - 1
        if method is None and is_prefix:
            session.commit(places)
            features = features[: len(places)]
            if not self.ended:
                self.method.observe(committed, features)
            return kept
        places_n, ids_n = to_device([places, committed], features.device)
        session.commit(places, places_n)
        if not self.ended:
            features = features[: len(places)] if is_prefix else features.index_select(0, places_n)
            if method is None:
                self.method.observe(committed, features)
            else:
                method.observe_on_device(committed, ids_n, features)
        return kept

    def _note_round(self, tree: DraftTree, verdict: Verdict, committed: list[int]) -> int:
        """What the round adds to the record; how many tokens belong to the answer."""
        record, path = self.record, verdict.path
        kept = self._keep(committed)
        record.accept_lengths.append(kept)
        record.draft_lengths.append(min(kept, len(path) - 1))
        record.draft_depths.append(tree.shape.draft_depth)
        rejected = kept == len(path) and bool(tree.children(path[-1]))
        record.tried += record.draft_lengths[-1] + rejected
        if kept == len(path) and verdict.next_token not in self._columns:
            self._note_outside(rejected)
        return kept

    def _note_outside(self, rejected: bool) -> None:
        """The round's last token could not have been drafted."""
        record = self.record
        record.outside_tokens = (record.outside_tokens or 0) + 1
        if rejected:
            record.ended_outside = [*(record.ended_outside or []), record.rounds - 1]

    def _keep(self, committed: list[int]) -> int:
        """Add to the answer what belongs to it: how many tokens."""
        record, matcher = self.record, self._matcher
        before = len(record.ids)
        for token in committed:
            record.ids.append(token)
            ends = token in self._end_ids or (matcher is not None and matcher.completes(token))
            self.ended = ends or len(record.ids) >= self._max_new_tokens
            if self.ended:
                break
        record.text = None if matcher is None else matcher.text_before
        return len(record.ids) - before


def _committed(tree: DraftTree, verdict: Verdict) -> list[int]:
    """The accepted path's tokens and the target's own."""
    return [*(tree.tokens[node] for node in verdict.path[1:]), verdict.next_token]
