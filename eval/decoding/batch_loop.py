"""The loop of `decoding.py` for several sequences at once: one verification forward for all of them.

Rows keep their own trees, verdicts and generators, so that each answer is the one that it would be alone. A row that
has ended leaves, and the next waiting prompt takes its place (continuous batching).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from draftsmith.eval.decoding.batch_session import BatchSession
from draftsmith.eval.decoding.loop import Generation, kept_tokens
from draftsmith.eval.decoding.method import Method, ReadsLogits
from draftsmith.eval.decoding.session import TargetStep
from draftsmith.eval.decoding.stop_strings import StopStrings, StopWatch
from draftsmith.eval.trees.sampling import Sampling, first_token
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.eval.trees.verify import Verdict, verify, verify_greedy
from draftsmith.recipes.errors import UserError


@dataclass(slots=True)
class _Place:
    """Where a sequence can be decoded: a method and a generator of its own."""

    method: Method
    generator: torch.Generator | None


@dataclass(slots=True)
class _Row:
    """A sequence at work. `number`: of its prompt."""

    place: _Place
    number: int
    out: Generation
    began: float
    watch: StopWatch | None

    def keep(self, committed: list[int], end_ids: Collection[int], max_new_tokens: int) -> tuple[int, bool]:
        """Add to the answer what belongs to it: how many tokens, and whether it ends with them."""
        kept, ended = kept_tokens(committed[: max_new_tokens - len(self.out.ids)], end_ids, self.watch)
        self.out.ids += committed[:kept]
        if self.watch is not None:
            self.out.text_before_stop = self.watch.text_before
        return kept, ended or len(self.out.ids) == max_new_tokens


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
) -> list[Generation]:
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
    if not 0 < len(methods) <= session.batch_size:
        raise ValueError(f"{len(methods)} methods for a session of {session.batch_size} rows: one for each row")
    for prompt_ids in prompts:
        if len(prompt_ids) + max_new_tokens > session.max_length_tokens:
            raise UserError(
                f"a prompt of {len(prompt_ids)} tokens and an answer of {max_new_tokens} do not fit into a session of "
                f"{session.max_length_tokens}: lower eval.max_new_tokens or shorten the prompt"
            )
    clock = time.perf_counter
    session.reset()
    chances: Sequence[torch.Generator | None] = generators or [None] * len(methods)
    free = [_Place(method, generator) for method, generator in zip(methods, chances, strict=True)][::-1]
    waiting = deque(range(len(prompts)))
    rows: list[_Row] = []
    answers: dict[int, Generation] = {}
    while waiting or rows:
        # 1. Fill the rows that are free. An answer may end with its first token.
        while waiting and free:
            number = waiting.popleft()
            seed = None if seeds is None else seeds[number]
            row, first = _begin(session, free.pop(), number, prompts[number], sampling, seed, stop)
            rows.append(row)
            if row.keep([first], end_ids, max_new_tokens)[1]:
                _leave(session, rows, len(rows) - 1, free, answers)
        if not rows:
            continue
        # 2. Draft: a tree for every row, without what could not be kept anyway.
        started = clock()
        trees = [row.place.method.propose().cut_to_depth(max_new_tokens - len(row.out.ids) - 1) for row in rows]
        drafted = clock()
        # 3. Verify all nodes of all trees in one forward.
        step = session.forward_trees(trees)
        session.synchronize()
        verified = clock()
        verdicts = _verdicts(trees, step, sampling, rows)
        # 4. Commit every row's path and the target's own token.
        session.commit([verdict.path for verdict in verdicts])
        ended = []
        for index, (row, tree, verdict) in enumerate(zip(rows, trees, verdicts, strict=True)):
            row.out.draft_s += drafted - started
            row.out.verify_s += verified - drafted
            logits, features = step.logits[index, : len(tree)], step.features[index]
            if _take(row, tree, verdict, TargetStep(logits, features), max_new_tokens, end_ids):
                ended.append(index)
        # 5. Who has ended leaves; from the end, since the last row takes the place of the one that left.
        for index in reversed(ended):
            _leave(session, rows, index, free, answers)
    return [answers[number] for number in range(len(prompts))]


def _begin(
    session: BatchSession,
    place: _Place,
    number: int,
    prompt_ids: list[int],
    sampling: Sampling,
    seed: int | None,
    stop: StopStrings | None,
) -> tuple[_Row, int]:
    """Read a prompt; its first token, from the target alone, beside the row."""
    began = time.perf_counter()
    if seed is not None and place.generator is not None:
        place.generator.manual_seed(seed)
    step = session.add(prompt_ids)
    first = first_token(step.logits[-1], sampling, place.generator)
    place.method.start(prompt_ids, step.features)
    place.method.observe([first], step.features[-1:])
    out = Generation([], prefill_s=time.perf_counter() - began)
    return _Row(place, number, out, began, None if stop is None else stop.watch()), first


def _verdicts(trees: list[DraftTree], step: TargetStep, sampling: Sampling, rows: list[_Row]) -> list[Verdict]:
    """What the target accepts in each row."""
    if sampling.greedy:
        argmax_ids = step.logits.argmax(-1).tolist()  # the device is waited for once, not once a row
        return [verify_greedy(tree, ids) for tree, ids in zip(trees, argmax_ids, strict=True)]
    return [
        verify(tree, step.logits[index, : len(tree)], sampling, row.place.generator)
        for index, (tree, row) in enumerate(zip(trees, rows, strict=True))
    ]


def _take(
    row: _Row, tree: DraftTree, verdict: Verdict, step: TargetStep, max_new_tokens: int, end_ids: Collection[int]
) -> bool:
    """Write down what a row has committed; whether its answer has ended. step: of its own nodes."""
    method, out, path = row.place.method, row.out, verdict.path
    if isinstance(method, ReadsLogits):
        method.read_logits(tree, step.logits)
    committed = [*(tree.tokens[node] for node in path[1:]), verdict.next_token]
    kept, ended = row.keep(committed, end_ids, max_new_tokens)
    out.accept_lengths.append(kept)
    out.draft_lengths.append(min(kept, len(path) - 1))
    if not ended:
        method.observe(committed, step.features[path])
    return ended


def _leave(
    session: BatchSession, rows: list[_Row], index: int, free: list[_Place], answers: dict[int, Generation]
) -> None:
    """A row's answer is complete: make room. The last row takes its place, as in the session."""
    row, last = rows[index], rows.pop()
    if index < len(rows):
        rows[index] = last
    session.drop(index)
    free.append(row.place)
    row.out.wall_time_s = time.perf_counter() - row.began
    answers[row.number] = row.out
