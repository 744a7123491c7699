"""One decoding round for every method, the autoregressive baseline included: draft, verify, commit.

A tree is made on the host, run by the target in one forward, and walked on the host; on a GPU a round waits once for
what was drafted and once for what was verified, at T > 0 for a few numbers more (`verify.py`).

The first token comes from the prefill and belongs to no round. Tokens after an end token, after the one that completes
a stop string, or beyond the limit are cut and count nowhere.

Shapes: P prompt, N tree nodes, n new tokens, F features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.eval.decoding.method import DraftsColumns, Method, ReadsLogits
from draftsmith.eval.decoding.session import TargetSession, TargetStep
from draftsmith.eval.decoding.stop_strings import StopMatcher, StopStrings
from draftsmith.eval.trees.verify import DraftTree, Sampling, Verdict, first_token, verify
from draftsmith.models.decoding.decoders import ALL_TOKENS, TokenColumns
from draftsmith.models.decoding.kv_cache import to_device

TIMELINE_ROUNDS = 16  # the first of an answer, whose phases are kept one by one


@dataclass(slots=True)
class AnswerRecord:
    """One answer to one prompt.

    ids: generated token ids, the end token or the token that completed a stop string included.
    text: the text before the stop string that ended the answer, if one did; the bench decodes the others.
    accept_lengths: tokens kept per round, the target's own included; their mean is tau.
    draft_lengths: drafted tokens kept per round; their mean is tau without the target's own token.
    draft_depths: the longest path drafted, per round.
    tried: drafted positions that verification came to; the share of accepted ones is the acceptance rate alpha.
    outside_tokens: tokens of the rounds that are not in the method's draft vocabulary, all of them the target's own;
        None: it can draft every token.
    ended_outside: the rounds, from 0, at which such a token stood where drafts were rejected: what the vocabulary, if
        nothing else, has ended. None as above.
    round_s: seconds of each round, of which the four phases below are the parts.
    phases_s: the four phases of each of the first rounds, for a picture of them.
    first_token_s: from the prompt to its first token; prefill_s: to the beginning of the first round.
    draft_s, verify_s, choose_s, commit_s: drafting; the target's forward over the tree; choosing the path; keeping it.
    """

    ids: list[int] = field(default_factory=list)
    text: str | None = None
    accept_lengths: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    draft_depths: list[int] = field(default_factory=list)
    tried: int = 0
    outside_tokens: int | None = None
    ended_outside: list[int] | None = None
    round_s: list[float] = field(default_factory=list)
    phases_s: list[list[float]] = field(default_factory=list)
    wall_time_s: float = 0.0
    first_token_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    choose_s: float = 0.0
    commit_s: float = 0.0

    @property
    def rounds(self) -> int:
        return len(self.accept_lengths)

    @property
    def accepted_drafts(self) -> int:
        return sum(self.draft_lengths)

    def add_round(self, tree: DraftTree, verdict: Verdict, kept: int, columns: TokenColumns) -> None:
        """Count a round of which `kept` tokens belong to the answer; `columns` are what the method can draft."""
        path = verdict.path
        self.accept_lengths.append(kept)
        self.draft_lengths.append(min(kept, len(path) - 1))
        self.draft_depths.append(tree.shape.draft_depth)
        rejected = kept == len(path) and bool(tree.children(path[-1]))
        self.tried += self.draft_lengths[-1] + rejected
        if kept == len(path) and verdict.next_token not in columns:
            # The round's last token could not have been drafted.
            self.outside_tokens = (self.outside_tokens or 0) + 1
            if rejected:
                self.ended_outside = [*(self.ended_outside or []), self.rounds - 1]

    def add_round_s(self, started: float, drafted: float, verified: float, chosen: float, done: float) -> None:
        """Add the phases of a round, from readings of one clock, in seconds."""
        phases = [drafted - started, verified - drafted, chosen - verified, done - chosen]
        self.draft_s += phases[0]
        self.verify_s += phases[1]
        self.choose_s += phases[2]
        self.commit_s += phases[3]
        if len(self.phases_s) < TIMELINE_ROUNDS:
            self.phases_s.append([round(seconds, 7) for seconds in phases])
        self.round_s.append(done - started)


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

    @property
    def accepted(self) -> int:
        """The number of drafted tokens that were kept."""
        return min(self.kept, len(self.verdict.path) - 1)

    @property
    def committed(self) -> list[int]:
        """The tokens that were kept: accepted drafts first."""
        return self.verdict.committed(self.tree)[: self.kept]


class Answering:
    """One answer under way: what becomes of it, round by round, whoever drafts and however many share a forward.

    Args are those of `generate`; `columns` are what is drafted from.
    """

    def __init__(
        self,
        sampling: Sampling,
        max_new_tokens: int,
        end_ids: Collection[int] = (),
        generator: torch.Generator | None = None,
        stop: StopStrings | None = None,
        lenience: float = 1.0,
        columns: TokenColumns = ALL_TOKENS,
    ) -> None:
        self.record, self._columns = AnswerRecord(), columns
        if columns.reduced:
            self.record.outside_tokens, self.record.ended_outside = 0, []
        self._sampling, self._generator, self._lenience = sampling, generator, lenience
        self._max_new_tokens, self._ending = max_new_tokens, _Ending(self.record, max_new_tokens, end_ids, stop)

    @property
    def reached(self) -> bool:
        """Whether the answer has its end."""
        return self._ending.reached

    def begin(self, logits_v: Tensor) -> int:
        """Keep the first token, which comes from the prompt's logits [V]; returns it."""
        first = first_token(logits_v, self._sampling, self._generator)
        self._ending.keep([first])
        return first

    def cut(self, tree: DraftTree) -> DraftTree:
        """Without what is deeper than the tokens that are still wanted, which could not be kept."""
        return tree.cut_to_depth(self._max_new_tokens - len(self.record.ids) - 1)

    def choose(self, tree: DraftTree, logits_nv: Tensor) -> Verdict:
        """Choose what is accepted, by the target's logits at the tree's nodes."""
        return verify(tree, logits_nv, self._sampling, self._generator, self._lenience)

    def take(self, tree: DraftTree, step: TargetStep, verdict: Verdict) -> tuple[Round, list[int], Tensor]:
        """Keep what belongs to the answer; the round, the tokens committed, and the features that predicted them."""
        path, committed = verdict.path, verdict.committed(tree)
        kept = self._ending.keep(committed)
        self.record.add_round(tree, verdict, kept, self._columns)
        in_order = path[-1] == len(path) - 1
        features = step.features[: len(path)] if in_order else step.features[to_device(path, step.features.device)]
        return Round(tree, step.logits, verdict, kept), committed, features


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
) -> AnswerRecord:
    """Answer a prompt. Greedy answers are exactly the target's; sampled ones have exactly its distribution.

    Neither holds with a lenience below 1, see `draftsmith.eval.trees.verify`.

    Args:
        generator: For the target's draws; the method has its own.
        on_round: Told of every round at its end; what it takes counts to the commit.

    Raises:
        UserError: Prompt and answer do not fit into the session.
    """
    session.check_room(prompt_ids, max_new_tokens)
    columns = method.columns if isinstance(method, DraftsColumns) else ALL_TOKENS
    answer = Answering(sampling, max_new_tokens, end_ids, generator, stop, lenience, columns)
    record, clock = answer.record, _PhaseClock(session.device)
    began_s = time.perf_counter()
    step = session.prefill(prompt_ids)
    first = answer.begin(step.logits[-1])
    record.first_token_s = time.perf_counter() - began_s
    method.start(prompt_ids, step.features)
    method.observe([first], step.features[-1:])
    record.prefill_s = time.perf_counter() - began_s
    reads_logits = method if isinstance(method, ReadsLogits) else None
    clock.mark()
    while not answer.reached:
        # 1. Draft.
        tree = answer.cut(method.propose())
        clock.mark()
        # 2. Verify all nodes in one forward.
        step = session.forward_tree(tree)
        clock.mark()
        verdict = answer.choose(tree, step.logits)
        if reads_logits is not None:
            reads_logits.read_logits(tree, step.logits)
        clock.mark()
        # 3. Commit the accepted path and the target's own token.
        session.commit(verdict.path)
        round_, committed, features = answer.take(tree, step, verdict)
        if not answer.reached:
            method.observe(committed, features)
        if on_round is not None:
            on_round(round_)
        clock.mark()
    session.synchronize()
    record.wall_time_s = time.perf_counter() - began_s
    marks = clock.seconds()
    for begin in range(0, len(marks) - 1, 4):
        record.add_round_s(*marks[begin : begin + 5])
    return record


class _Ending:
    """Where an answer ends: at an end token, with a stop string, or at the limit."""

    def __init__(
        self, record: AnswerRecord, max_new_tokens: int, end_ids: Collection[int], stop: StopStrings | None
    ) -> None:
        self._record, self._max_new_tokens, self._end_ids = record, max_new_tokens, end_ids
        self._matcher = None if stop is None else StopMatcher(stop)
        self.reached = False

    def keep(self, committed: list[int]) -> int:
        """Add to the answer what belongs to it, and return how many tokens that is."""
        record, matcher = self._record, self._matcher
        before = len(record.ids)
        for token in committed:
            record.ids.append(token)
            ends = token in self._end_ids or (matcher is not None and matcher.completes(token))
            self.reached = ends or len(record.ids) >= self._max_new_tokens
            if self.reached:
                break
        record.text = None if matcher is None else matcher.text_before
        return len(record.ids) - before


class _PhaseClock:
    """When the phases of a round began: read off the host's clock, or, on a GPU, off events in its queue.

    An event costs the host nothing and waits for nothing; it says when the device came to it. What the device idles
    while the host works counts to the phase that the host is in then.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._marks: list[float] = []

    def mark(self) -> None:
        if self._stream is None:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._events.append(event)

    def seconds(self) -> list[float]:
        """All marks, from any beginning, once the device has come to the last."""
        return self._marks or [self._events[0].elapsed_time(event) / 1000 for event in self._events]
