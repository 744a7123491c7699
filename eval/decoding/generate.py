"""One decoding round for every method, the autoregressive baseline included: draft, verify, commit (`decode_round`).

The target runs a tree in one forward; then the host verifies it. On a GPU the host waits once per round for the result
of verification, at T > 0 sometimes more often (`verify.py`). The draft tokens are copied in the same wait if they are a
chain, or, at T = 0, a static tree. Other trees are built on the host, which waits for the draft once, or once a level.

The first token comes from the prefill and belongs to no round. Tokens after an end token, after the one that completes
a stop string, or beyond the limit are cut and count nowhere.

Shapes: P prompt, N tree nodes, n new tokens, F features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftsmith.eval.decoding.method import Method
from draftsmith.eval.decoding.session import TargetSession, TargetStep
from draftsmith.eval.decoding.stop_strings import StopMatcher
from draftsmith.eval.trees.verify import DraftTree, Verification, verify
from draftsmith.models.decoding.decoders import TokenColumns
from draftsmith.models.decoding.kv_cache import to_device
from draftsmith.models.kernels.cuda_attention import without_cudnn_attention
from draftsmith.models.sampling import Sampling, first_token


@dataclass(slots=True)
class AnswerRecord:
    """One answer to one prompt.

    ids: generated token ids, the end token or the token that completed a stop string included.
    text: the text before the stop string that ended the answer, if one did; the bench decodes the others.
    accept_lengths: number of tokens that each round commits, the target's own included; their mean is tau.
    draft_lengths: number of accepted draft tokens of each round; their mean is tau without the target's own token.
    draft_depths: length of each round's longest drafted path.
    tried: number of drafted depths that verification reached; the accepted share of them is the acceptance rate alpha.
    outside_tokens: number of the rounds' tokens that are not in the method's draft vocabulary, all of them the target's
        own; None: the method can draft every token.
    ended_outside: indices, from 0, of the rounds that rejected draft tokens and ended with a token outside the draft
        vocabulary, which no draft could have matched. None: the method can draft every token.
    round_s: seconds of each round; the four phases below are sums over all rounds. wall_time_s: the whole answer's.
    prefill_s: seconds from the start to the start of the first round.
    draft_s, verify_s, choose_s, commit_s: drafting; the target's forward over the tree; choosing the accepted path;
        committing it. first_draft_s: draft_s of the first round, in which the drafter reads the prompt, or None.
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
    wall_time_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    choose_s: float = 0.0
    commit_s: float = 0.0
    first_draft_s: float | None = None

    @property
    def rounds(self) -> int:
        return len(self.accept_lengths)

    @property
    def accepted_drafts(self) -> int:
        return sum(self.draft_lengths)

    @property
    def usual_draft_s(self) -> float:
        """Return the seconds of drafting in all rounds, with the first round counted as the mean of the others."""
        if self.first_draft_s is None or self.rounds < 2:
            return self.draft_s
        return (self.draft_s - self.first_draft_s) * self.rounds / (self.rounds - 1)

    def add_round(self, tree: DraftTree, verification: Verification, kept: int, columns: TokenColumns) -> None:
        """Add a round's figures. kept: number of its tokens in the answer. columns: tokens that can be drafted."""
        path = verification.path
        self.accept_lengths.append(kept)
        self.draft_lengths.append(min(kept, len(path) - 1))
        self.draft_depths.append(tree.shape.draft_depth)
        rejected = kept == len(path) and bool(tree.children(path[-1]))
        self.tried += self.draft_lengths[-1] + rejected
        if self.ended_outside is not None and kept == len(path) and verification.next_token not in columns:
            # The round's last token could not have been drafted.
            self.outside_tokens = (self.outside_tokens or 0) + 1
            if rejected:
                self.ended_outside.append(self.rounds - 1)


@dataclass(slots=True)
class Round:
    """Result of one round: draft, verification and commit.

    logits: [N, V] of the target at the tree's nodes; a compiled target's next forward may overwrite them.
    kept: number of committed tokens (a accepted draft tokens, then the target's own) that belong to the answer.
    features: [a+1, F] of the target at the accepted path's nodes: row i predicted the i-th committed token.
    """

    tree: DraftTree
    logits: Tensor
    verification: Verification
    kept: int
    features: Tensor

    @property
    def accepted(self) -> int:
        """Return the number of accepted draft tokens."""
        return min(self.kept, len(self.verification.path) - 1)

    @property
    def committed(self) -> list[int]:
        """Return the committed tokens that belong to the answer: accepted draft tokens, then the target's own."""
        return self.verification.committed(self.tree)[: self.kept]


@dataclass
class Generation:
    """State of one generation: its method, its sampling, and the answer so far. Arguments as in `generate`."""

    method: Method  # one that takes over later must have read all tokens so far
    sampling: Sampling
    max_new_tokens: int
    end_ids: Collection[int] = ()
    generator: torch.Generator | None = None
    stop: StopMatcher | None = None
    lenience: float = 1.0

    def __post_init__(self) -> None:
        self.record, self.finished = AnswerRecord(), False
        if self.method.columns.ids is not None:
            self.record.outside_tokens, self.record.ended_outside = 0, []

    def begin(self, session: TargetSession, prompt_ids: list[int]) -> Tensor:
        """Read the prompt, start the method and add the answer's first token; return the prompt's features [P, F]."""
        started_s = time.perf_counter()
        step = session.prefill(prompt_ids)
        self._keep([first_token(step.logits[-1], self.sampling, self.generator)])
        self.method.start(prompt_ids, step.features)
        self.method.observe(self.record.ids[:1], step.features[-1:])
        self.record.prefill_s = time.perf_counter() - started_s
        return step.features

    def draft(self, deepest: int) -> DraftTree:
        """Draft a tree, and cut it to depth `deepest` and to the number of tokens that the answer may still get."""
        return self.method.propose().cut_to_depth(min(deepest, self.max_new_tokens - len(self.record.ids) - 1))

    def choose(self, tree: DraftTree, step: TargetStep) -> Verification:
        """Choose the accepted path of a draft tree, by the target's p and the drafter's q at every node."""
        verification = verify(tree, step.logits, self.sampling, self.generator, self.lenience)
        self.method.read_logits(tree, step.logits)
        return verification

    def commit(self, tree: DraftTree, step: TargetStep, verification: Verification) -> Round:
        """Add the round's tokens to the answer; unless the answer ends with them, pass them to the method."""
        path, committed = verification.path, verification.committed(tree)
        in_order = path[-1] == len(path) - 1
        features = step.features[: len(path)] if in_order else step.features[to_device(path, step.features.device)]
        kept = self._keep(committed)
        self.record.add_round(tree, verification, kept, self.method.columns)
        if not self.finished:
            self.method.observe(committed, features)
        return Round(tree, step.logits, verification, kept, features)

    def _keep(self, committed: list[int]) -> int:
        """Add tokens to the answer up to its end; returns their number.

        It ends at an end token, at the token that completes a stop string, or at the limit.
        """
        record, matcher = self.record, self.stop
        before = len(record.ids)
        for token in committed:
            record.ids.append(token)
            ends = token in self.end_ids or (matcher is not None and matcher.completes(token))
            self.finished = ends or len(record.ids) >= self.max_new_tokens
            if self.finished:
                break
        record.text = None if matcher is None else matcher.text_before
        return len(record.ids) - before


@without_cudnn_attention()
def decode_round(session: TargetSession, generation: Generation, mark: Callable[[], None] = lambda: None) -> Round:
    """Run one round of a generation: draft, verify, commit.

    p is the target's distribution at a node of the draft tree, q the drafter's, which drew the node's children. Must be
    called in `torch.inference_mode`.

    Args:
        mark: Called after the draft, after the target's forward, and after the choice of the accepted path.
    """
    # 1. Draft: a tree of tokens, chosen or drawn by q.
    tree = generation.draft(session.deepest_draft)
    mark()
    # 2. Verify: p at all nodes of the tree in one forward, then the path that p and q accept.
    step = session.forward_tree(tree)
    mark()
    verification = generation.choose(tree, step)
    mark()
    # 3. Commit: the path's keys and values stay in the cache, its tokens and the target's own join the answer.
    session.commit(verification.path)
    return generation.commit(tree, step, verification)


@torch.inference_mode()
def generate(
    session: TargetSession,
    method: Method,
    prompt_ids: list[int],
    sampling: Sampling,
    max_new_tokens: int,
    end_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
    stop: StopMatcher | None = None,
    lenience: float = 1.0,
    on_round: Callable[[Round], None] | None = None,
) -> AnswerRecord:
    """Answer a prompt. Greedy answers are exactly the target's; sampled ones have exactly its distribution.

    Neither holds with a lenience below 1, see `draftsmith.eval.trees.verify`.

    Args:
        generator: For the target's draws; usually shared with the method.
        stop: `StopMatcher` that finds the strings that end an answer; pass a new one for each answer.
        on_round: Called at the end of every round; its time counts to the commit.

    Raises:
        UserError: Prompt and answer do not fit into the session.
    """
    session.check_room(prompt_ids, max_new_tokens)
    generation = Generation(method, sampling, max_new_tokens, end_ids, generator, stop, lenience)
    record, clock = generation.record, _PhaseClock(session.device)
    started_s = time.perf_counter()
    generation.begin(session, prompt_ids)
    clock.mark()
    while not generation.finished:
        round_ = decode_round(session, generation, clock.mark)
        if on_round is not None:
            on_round(round_)
        clock.mark()
    session.synchronize()
    record.wall_time_s = time.perf_counter() - started_s
    phases = np.diff(clock.seconds()).reshape(-1, 4)  # of each round
    record.round_s = phases.sum(1).tolist()
    record.draft_s, record.verify_s, record.choose_s, record.commit_s = phases.sum(0).tolist()
    record.first_draft_s = float(phases[:1, 0].sum())
    return record


class _PhaseClock:
    """Clock of a round's phases: the host's, or, on a GPU, events in its queue.

    An event costs the host nothing and waits for nothing; it records when the device reached it. The device's idle
    time counts to the phase that the host is in then.
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
        """Return all marks in seconds from an arbitrary origin; on a GPU the last must have been waited for."""
        return self._marks or [self._events[0].elapsed_time(event) / 1000 for event in self._events]
