"""The loop of `loop.py` for several sequences at once: one verification forward for all of them.

Rows keep their own trees, verdicts and generators, so that each answer is the one that it would be alone. A row that
has ended leaves, and the next waiting prompt takes its place (continuous batching).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from draftsmith.eval.decoding.answer import AnswerRecord
from draftsmith.eval.decoding.batch_session import BatchSession
from draftsmith.eval.decoding.loop import OpenAnswer
from draftsmith.eval.decoding.method import Method
from draftsmith.eval.decoding.session import TargetStep
from draftsmith.eval.decoding.stop_strings import StopStrings
from draftsmith.eval.trees.sampling import Sampling, largest
from draftsmith.eval.trees.verify import verify, verify_greedy


@torch.inference_mode()
def generate_batch(
    session: BatchSession,
    methods: Sequence[Method],
    prompts: Sequence[list[int]],
    sampling: Sampling,
    max_new_tokens: int,
    end_ids: Collection[int] = (),
    generators: Sequence[torch.Generator] | None = None,
    seeds: Sequence[int] | None = None,
    stop: StopStrings | None = None,
) -> list[AnswerRecord]:
    """Answer all prompts, as many at once as there are methods. Each answer is exactly what `generate` gives.

    Args:
        session: Has as many rows as there are methods, or more.
        methods: One for each row: they remember their sequence.
        prompts: Any number; those that find no free row wait.
        generators: One for each row, the one that its method draws from too; for temperatures > 0.
        seeds: One for each prompt, which its row's generator starts it with: its answer then does not depend on which
            row it was given, nor on what was decoded there before.

    Returns:
        One answer a prompt, in their order. Times are those of the rounds that the row took part in, shared with all
        rows: throughput is all tokens over the time of the whole call.

    Raises:
        UserError: A prompt and its answer do not fit into the session.
        ValueError: More methods than rows, or not one generator a method.
    """
    for prompt_ids in prompts:
        session.check_room(prompt_ids, max_new_tokens)
    loop = BatchLoop(session, methods, end_ids, generators, stop)
    answers: list[OpenAnswer] = []
    while loop.is_busy or len(answers) < len(prompts):
        while loop.has_room and len(answers) < len(prompts):
            number = len(answers)
            seed = None if seeds is None else seeds[number]
            answers.append(loop.begin(prompts[number], sampling, max_new_tokens, seed))
        loop.advance()
    session.reset()
    return [answer.record for answer in answers]


class BatchLoop:
    """Rows at work: `begin` a prompt while one is free, `advance` all by a round. As `generate_batch`, step by step.

    Each answer has its own sampling and limit; prompt and answer must fit into the session.

    Raises:
        ValueError: More methods than rows, or not one generator a method.
    """

    def __init__(
        self,
        session: BatchSession,
        methods: Sequence[Method],
        end_ids: Collection[int] = (),
        generators: Sequence[torch.Generator] | None = None,
        stop: StopStrings | None = None,
    ) -> None:
        if not 0 < len(methods) <= session.batch_size:
            raise ValueError(f"{len(methods)} methods for a session of {session.batch_size} rows: one for each row")
        session.reset()
        of_rows: Sequence[torch.Generator | None] = generators or [None] * len(methods)
        self._free = list(zip(methods, of_rows, strict=True))[::-1]
        self._rows: list[OpenAnswer] = []  # in the session's order
        self._told: list[OpenAnswer] = []  # of these: they have ended, and `advance` has said so
        self._session, self._end_ids, self._stop = session, end_ids, stop

    @property
    def has_room(self) -> bool:
        return bool(self._free or self._told)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is open, or ended with nobody told."""
        return len(self._rows) > len(self._told)

    @torch.inference_mode()
    def begin(
        self, prompt_ids: list[int], sampling: Sampling, max_new_tokens: int, seed: int | None = None
    ) -> OpenAnswer:
        """Read a prompt into a free row. `seed`: what the row's generator is started with."""
        if not self._free:
            self._leave(self._told.pop())
        method, generator = self._free.pop()
        answer = OpenAnswer(method, generator, sampling, max_new_tokens, self._end_ids, self._stop)
        return self._open(answer, self._session.add, prompt_ids, seed)

    def has_row_of(self, answer: OpenAnswer) -> bool:
        """Whether `go_on` is possible behind it."""
        return answer in self._told

    @torch.inference_mode()
    def go_on(
        self,
        last: OpenAnswer,
        prompt_ids: list[int],
        sampling: Sampling,
        max_new_tokens: int,
        seed: int | None = None,
    ) -> OpenAnswer:
        """Read on behind an answer that `advance` gave last, whose row has the prompt's first tokens: the next turn.

        Its method learns the features of what is read now, not of the whole prompt.
        """
        row = self._rows.index(last)
        self._told.remove(last)
        answer = OpenAnswer(last.method, last.generator, sampling, max_new_tokens, self._end_ids, self._stop)
        self._open(answer, partial(self._session.extend, row), prompt_ids, seed)
        self._rows[row] = self._rows.pop()
        return answer

    @torch.inference_mode()
    def advance(self) -> list[OpenAnswer]:
        """A round of all rows, or none if an answer ended with its first token. Gives those that have ended.

        They leave with the next call, unless `go_on` or `begin` has their row by then.
        """
        while self._told:
            self._leave(self._told.pop())
        if self._rows and not any(row.ended for row in self._rows):
            _round(self._session, self._rows)
        self._told = [row for row in self._rows if row.ended]
        for row in self._told:
            row.record.wall_time_s = time.perf_counter() - row.began_s
        return list(self._told)

    def _open(
        self,
        answer: OpenAnswer,
        prefill: Callable[[list[int]], TargetStep],
        prompt_ids: list[int],
        seed: int | None,
    ) -> OpenAnswer:
        if seed is not None and answer.generator is not None:
            answer.generator.manual_seed(seed)
        answer.begin(prefill, prompt_ids)
        self._rows.append(answer)
        return answer

    def _leave(self, answer: OpenAnswer) -> None:
        """The last row takes the place of the one that leaves."""
        row = self._rows.index(answer)
        self._session.drop(row)
        self._rows[row] = self._rows[-1]
        self._rows.pop()
        self._free.append((answer.method, answer.generator))


def _round(session: BatchSession, rows: list[OpenAnswer]) -> None:
    """One round of all rows, in the steps of `generate`."""
    clock = time.perf_counter
    started = clock()
    trees = [row.propose() for row in rows]
    drafted = clock()
    step = session.forward_trees(trees)
    session.synchronize()
    verified = clock()
    logits = [step.logits[index, : len(tree)] for index, tree in enumerate(trees)]
    # The device is waited for once, not once a greedy row.
    argmax_ids = largest(step.logits).tolist() if any(row.sampling.greedy for row in rows) else [[]] * len(rows)
    verdicts = [
        verify_greedy(tree, ids) if row.sampling.greedy else verify(tree, at_nodes, row.sampling, row.generator)
        for row, tree, at_nodes, ids in zip(rows, trees, logits, argmax_ids, strict=True)
    ]
    for row, tree, at_nodes in zip(rows, trees, logits, strict=True):
        row.show_logits(tree, at_nodes)
    chosen = clock()
    session.commit([verdict.path for verdict in verdicts])
    for row, tree, verdict, features in zip(rows, trees, verdicts, step.features, strict=True):
        row.commit(tree, verdict, features)
    done = clock()
    for row in rows:
        row.record.add_round_s(started, drafted, verified, chosen, done)
