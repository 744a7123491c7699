"""Ask an engine every question, with so many conversations in flight, and work out the figures of its answers.

A turn is asked as soon as its previous answer is there. Prompts and histories are made as in
`eval/bench/spec_bench.py`, so that the same answers give the same prompts.

tau                   1 + accepted / drafts, over all drafts together, as vLLM logs it
tau_by_question       mean over questions of the tau of each, as papers and SpecForge have it; where they were asked
                      one at a time
tau_committed         tokens committed per draft, without what was accepted past an answer's end: our own decoder's tau
acceptance_by_depth   marginal; acceptance_conditional: given that the token before was accepted
tokens_per_s          generated tokens of all answers / seconds from the first request to the last answer
first_token_s, time_per_output_token_s   medians over answers, and the 90th percentile of the first; the latter is
                      seconds from the first token to the last / tokens after the first
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from draftsmith.data.engines.engine import Failure, GenerationSettings, Request
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import Question
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.bench.spec_bench import FEWEST_NEW_TOKENS, request_seed
from draftsmith.eval.serving.endpoint import DraftCounts, Endpoint
from draftsmith.recipes.progress import progress_bar

PLAIN, DRAFTING = "without drafter", "with drafter"


@dataclass(frozen=True)
class ServedAnswer:
    """Hold the answer to one turn, with its prompt and times."""

    question_id: int | str
    turn: int
    prompt_ids: list[int]
    ids: list[int]
    first_token_s: float
    rest_s: float


@dataclass
class Asked:
    """Hold what came of all questions.

    failures: by their reason; by_question: what was counted of each, where they were asked one at a time.
    """

    answers: list[ServedAnswer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    turns_left_out: int = 0
    wall_time_s: float = 0.0
    counts: DraftCounts = field(default_factory=DraftCounts)
    by_question: list[DraftCounts] = field(default_factory=list)


def ask(
    endpoint: Endpoint,
    tokenizer: Any,
    questions: list[Question],
    settings: GenerationSettings,
    seed: int,
    concurrency: int,
    label: str = "",
) -> Asked:
    """Ask all questions and wait for the last answer. A conversation ends at an answer that fails.

    Args:
        settings: Of every turn.
        seed: Of all sampling.
        label: Of a progress bar; none is drawn without one.

    Raises:
        UserError: The engine cannot go on.
    """
    asked = Asked()

    async def converse(question: Question) -> None:
        history: list[Turn] = []
        for number, text in enumerate(question.turns):
            history.append(Turn("user", text))
            prompt_ids = prompt_token_ids(tokenizer, history)
            most = settings.max_new_tokens
            room = most if endpoint.max_length_tokens is None else endpoint.max_length_tokens - len(prompt_ids)
            if room < min(most, FEWEST_NEW_TOKENS):
                asked.turns_left_out += len(question.turns) - number
                return
            own_seed = request_seed(seed, 0, question.question_id, number, f"engine@{settings.temperature:g}")
            bounded = replace(settings, max_new_tokens=min(most, room))
            answer = await endpoint.answer(
                Request(f"{question.question_id}/{number}", prompt_ids, [], bounded, own_seed)
            )
            if isinstance(answer, Failure):
                asked.failures[answer.reason] += 1
                return
            times_s = (answer.first_token_s, answer.rest_s)
            asked.answers.append(ServedAnswer(question.question_id, number, prompt_ids, answer.ids, *times_s))
            history.append(Turn("assistant", tokenizer.decode(answer.ids, skip_special_tokens=True).strip()))

    async def work(waiting: Iterator[Question]) -> None:
        for question in waiting:
            await converse(question)
            progress.update()

    async def all_of(group: list[Question]) -> None:
        waiting = iter(group)
        await asyncio.gather(*(work(waiting) for _ in range(concurrency)))

    before = latest = endpoint.counts()
    with progress_bar(len(questions), label, "question", shown=bool(label)) as progress:
        for group in [[question] for question in questions] if concurrency == 1 else [questions]:
            started = time.perf_counter()
            endpoint.run(all_of(group))
            asked.wall_time_s += time.perf_counter() - started
            generated = sum(len(answer.ids) for answer in asked.answers)
            now = endpoint.counts(before.generated_tokens + generated)
            if concurrency == 1:
                asked.by_question.append(now - latest)
            latest = now
    asked.counts = latest - before
    return asked


def level_figures(asked: Asked, arm: str, temperature: float, concurrency: int) -> dict[str, Any]:
    """Return the row of one side at one temperature and concurrency."""
    return {
        "arm": arm,
        "temperature": temperature,
        "concurrency": concurrency,
        "answers": len(asked.answers),
        "failures": dict(asked.failures),
        "turns_left_out": asked.turns_left_out,
        **clock_figures(asked.answers, asked.wall_time_s),
        **draft_figures(asked.counts, asked.by_question, asked.answers),
    }


def clock_figures(answers: Sequence[ServedAnswer], wall_time_s: float) -> dict[str, Any]:
    tokens = sum(len(answer.ids) for answer in answers)
    first = [answer.first_token_s for answer in answers]
    rest = [answer.rest_s / (len(answer.ids) - 1) for answer in answers if len(answer.ids) > 1]
    return {
        "tokens": tokens,
        "wall_time_s": wall_time_s,
        "tokens_per_s": tokens / wall_time_s if wall_time_s > 0 else None,
        "first_token_s": statistics.median(first) if first else None,
        "first_token_p90_s": float(np.percentile(first, 90)) if first else None,
        "time_per_output_token_s": statistics.median(rest) if rest else None,
    }


def draft_figures(
    counts: DraftCounts, by_question: Sequence[DraftCounts], answers: Sequence[ServedAnswer]
) -> dict[str, Any]:
    """Return the figures of drafting, all None or empty where nothing was drafted."""
    taus = [counted.tau for counted in by_question if counted.tau is not None]
    after_the_first = sum(len(answer.ids) - 1 for answer in answers)
    return {
        "drafts": counts.drafts,
        "drafted_tokens": counts.drafted_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "tau": counts.tau,
        "tau_by_question": statistics.fmean(taus) if taus else None,
        "tau_committed": after_the_first / counts.drafts if counts.drafts else None,
        "acceptance_by_depth": counts.acceptance_by_depth,
        "acceptance_conditional": counts.acceptance_conditional,
    }


def with_speedups(levels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `speedup`: tokens per second against the plain side's at the same temperature and concurrency."""
    plain = {(row["temperature"], row["concurrency"]): row["tokens_per_s"] for row in levels if row["arm"] == PLAIN}
    for row in levels:
        base = plain.get((row["temperature"], row["concurrency"]))
        known = row["arm"] == DRAFTING and base and row["tokens_per_s"]
        row["speedup"] = row["tokens_per_s"] / base if known else None
    return levels
