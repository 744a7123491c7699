"""The loop: draft, verify, commit. One for every method, the autoregressive baseline included.

A tree is made on the host, run by the target in one forward, and walked on the host; on a GPU a round waits once for
what was drafted and once for what was verified, at T > 0 for a few numbers more (`verify.py`).

The first token comes from the prefill and belongs to no round. Tokens after an end token, after the one that completes
a stop string, or beyond the limit are cut and count nowhere.

Shapes: N tree nodes, F features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.decoding.method import DraftsColumns, Method, ReadsLogits
from draftsmith.eval.decoding.session import TargetSession, TargetStep
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.eval.trees.verify import Sampling, Verdict, first_token, verify
from draftsmith.models.decoding.decoders import ALL_TOKENS
from draftsmith.models.decoding.kv_cache import to_device

TIMELINE_ROUNDS = 16  # the first of an answer, whose phases are kept one by one
UNFINISHED = "\ufffd"  # how a decoder writes a character of which bytes are missing


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

    def add_round_s(self, started: float, drafted: float, verified: float, chosen: float, done: float) -> None:
        """Where a round's time went: readings of one clock."""
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
        on_round: Told of every round at its end; what it takes counts to the commit.

    Raises:
        UserError: Prompt and answer do not fit into the session.
    """
    session.check_room(prompt_ids, max_new_tokens)
    clock = _PhaseClock(session.device)
    answer = OpenAnswer(method, generator, sampling, max_new_tokens, end_ids, stop)
    answer.begin(session.prefill, prompt_ids)
    clock.mark()
    while not answer.ended:
        # 1. Draft.
        tree = answer.propose()
        clock.mark()
        # 2. Verify all nodes in one forward.
        step = session.forward_tree(tree)
        clock.mark()
        verdict = verify(tree, step.logits, sampling, generator, lenience)
        answer.show_logits(tree, step.logits)
        clock.mark()
        # 3. Commit the accepted path and the target's own token.
        session.commit(verdict.path)
        kept = answer.commit(tree, verdict, step.features)
        if on_round is not None:
            on_round(Round(tree, step.logits, verdict, kept))
        clock.mark()
    session.synchronize()
    out = answer.record
    out.wall_time_s = time.perf_counter() - answer.began_s
    marks = clock.seconds()
    for first in range(0, len(marks) - 1, 4):
        out.add_round_s(*marks[first : first + 5])
    return out


class OpenAnswer:
    """An answer that is being decoded: what the loops for one and for several sequences do with each of them.

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
        self._columns = method.columns if isinstance(method, DraftsColumns) else ALL_TOKENS
        if self._columns.reduced:
            self.record.outside_tokens, self.record.ended_outside = 0, []
        self._max_new_tokens, self._end_ids = max_new_tokens, end_ids
        self._matcher = None if stop is None else StopMatcher(stop)

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

    def show_logits(self, tree: DraftTree, logits: Tensor) -> None:
        """logits: [N, V]."""
        if self._reader is not None:
            self._reader.read_logits(tree, logits)

    def commit(self, tree: DraftTree, verdict: Verdict, features: Tensor) -> int:
        """Write down what a round has committed, and tell the method; how many tokens belong to the answer.

        Args:
            features: [N, F] at the tree's nodes, or more.
        """
        record, path = self.record, verdict.path
        committed = [*(tree.tokens[node] for node in path[1:]), verdict.next_token]
        kept = self._keep(committed)
        record.accept_lengths.append(kept)
        record.draft_lengths.append(min(kept, len(path) - 1))
        record.draft_depths.append(tree.shape.draft_depth)
        rejected = kept == len(path) and bool(tree.children(path[-1]))
        record.tried += record.draft_lengths[-1] + rejected
        if kept == len(path) and verdict.next_token not in self._columns:
            # The round's last token could not have been drafted.
            record.outside_tokens = (record.outside_tokens or 0) + 1
            if rejected:
                record.ended_outside = [*(record.ended_outside or []), record.rounds - 1]
        if not self.ended:
            in_order = path[-1] == len(path) - 1
            features = features[: len(path)] if in_order else features[to_device(path, features.device)]
            self.method.observe(committed, features)
        return kept

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


@dataclass(frozen=True)
class StopStrings:
    """Strings that end an answer at the token with which one of them becomes complete, its text just before it.

    As in transformers, vLLM and OpenAI's API. The text is decoded as it grows, without special tokens: a token may hold
    a piece of a character, a piece of a stop string, or more than one. What is found depends on the tokens alone, one
    after the other, so that every method cuts where the autoregressive loop does.

    Args:
        strings: Each non-empty.
        tokenizer: The target's; only `decode` is used.
    """

    strings: tuple[str, ...]
    tokenizer: Any


class StopMatcher:
    """Reads one answer token by token.

    Only the latest tokens are decoded again: from those of the last complete piece of text, whose own text is known,
    since what a tokenizer makes of a token may depend on the one before it (a leading space).
    """

    def __init__(self, stop: StopStrings) -> None:
        self._stop = stop
        self._text = ""  # complete characters
        self._context: list[int] = []  # the tokens of the last complete piece
        self._pending: list[int] = []  # those after it
        self.text_before: str | None = None

    def completes(self, token: int) -> bool:
        """Whether a stop string is complete with this token; then `text_before` is the answer's text before it."""
        self._pending.append(token)
        known = self._decode(self._context)
        new = self._decode([*self._context, *self._pending])[len(known) :]
        settled = not new.endswith(UNFINISHED)
        text = self._text + new.rstrip(UNFINISHED)
        found = [text.find(string, max(0, len(self._text) - len(string) + 1)) for string in self._stop.strings]
        places = [place for place in found if place >= 0]
        if places:
            self.text_before = text[: min(places)]
            return True
        if new and settled:
            self._text, self._context, self._pending = text, self._pending, []
        return False

    def _decode(self, ids: list[int]) -> str:
        return self._stop.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""


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
