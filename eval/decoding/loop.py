"""The loop: draft, verify, commit. One for every method, the autoregressive baseline included.

A tree is made on the host, run by the target in one forward, and walked on the host; on a GPU a round waits once for
what was drafted and once for what was verified, at T > 0 for a few numbers more (`verify.py`).

The first token comes from the prefill and belongs to no round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.decoding.answer import AnswerRecord, OpenAnswer, StopStrings
from draftsmith.eval.decoding.method import Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.eval.trees.verify import Verdict, verify


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
