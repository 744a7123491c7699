"""Every question to an engine, with so many conversations in flight, and the figures of what comes back.

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

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from draftsmith.data.engines.engine import Completion, Failure, GenerationSettings, Request
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import Question
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.bench.spec_bench import FEWEST_NEW_TOKENS, request_seed
from draftsmith.eval.serving.endpoint import DraftCounts, Endpoint, TimedCompletion
from draftsmith.recipes.progress import progress_bar

PLAIN, DRAFTING = "without drafter", "with drafter"


@dataclass(frozen=True)
class Asking:
    """What answers depend on. settings: of every turn; seed: of all sampling."""

    tokenizer: Any
    settings: GenerationSettings
    seed: int


@dataclass(frozen=True)
class ServedAnswer:
    """One turn's."""

    question_id: int | str
    turn: int
    prompt_ids: list[int]
    ids: list[int]
    first_token_s: float
    rest_s: float


@dataclass
class Asked:
    """What came of all questions.

    failures: by their reason; by_question: what was counted of each, where they were asked one at a time.
    """

    answers: list[ServedAnswer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    turns_left_out: int = 0
    wall_time_s: float = 0.0
    counts: DraftCounts = field(default_factory=DraftCounts)
    by_question: list[DraftCounts] = field(default_factory=list)


@dataclass
class _Conversation:
    question: Question
    history: list[Turn] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)

    @property
    def turn(self) -> int:
        return len(self.history) // 2


def ask(endpoint: Endpoint, questions: list[Question], asking: Asking, concurrency: int, label: str = "") -> Asked:
    """Ask them all and wait for the last answer.

    Raises:
        UserError: The engine cannot go on.
    """
    asked = Asked()
    waiting: Iterator[_Conversation] = (_Conversation(question) for question in questions)
    in_flight: dict[str, _Conversation] = {}
    before = latest = endpoint.counts()
    generated = before.generated_tokens
    started = time.perf_counter()
    with progress_bar(len(questions), label, "question", shown=bool(label)) as progress:
        while True:
            while len(in_flight) < concurrency and (conversation := next(waiting, None)) is not None:
                if not _submit_turn(endpoint, conversation, asking, asked, in_flight):
                    progress.update()
            if not in_flight:
                break
            for key, outcome in endpoint.collect():
                conversation = in_flight.pop(key)
                if isinstance(outcome, Failure):
                    asked.failures[outcome.reason] += 1
                else:
                    generated += len(_add_answer(asked, conversation, outcome, asking.tokenizer))
                    if _submit_turn(endpoint, conversation, asking, asked, in_flight):
                        continue
                progress.update()
                if concurrency == 1:
                    asked.wall_time_s += time.perf_counter() - started
                    now = endpoint.counts(generated)
                    asked.by_question.append(now - latest)
                    latest, started = now, time.perf_counter()
    asked.wall_time_s += time.perf_counter() - started
    asked.counts = endpoint.counts(generated) - before
    return asked


def _submit_turn(
    endpoint: Endpoint, conversation: _Conversation, asking: Asking, asked: Asked, in_flight: dict[str, Any]
) -> bool:
    """The next turn, if there is one and room for it."""
    question, number = conversation.question, conversation.turn
    if number == len(question.turns):
        return False
    conversation.history.append(Turn("user", question.turns[number]))
    conversation.prompt_ids = prompt_token_ids(asking.tokenizer, conversation.history)
    settings = asking.settings
    if endpoint.max_length_tokens is not None:
        room = endpoint.max_length_tokens - len(conversation.prompt_ids)
        if room < min(settings.max_new_tokens, FEWEST_NEW_TOKENS):
            asked.turns_left_out += len(question.turns) - number
            return False
        settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, room))
    key = f"{question.question_id}/{number}"
    messages = [{"role": turn.role, "content": turn.content} for turn in conversation.history]
    seed = request_seed(asking.seed, 0, question.question_id, number, f"engine@{settings.temperature:g}")
    in_flight[key] = conversation
    endpoint.submit(Request(key, conversation.prompt_ids, messages, settings, seed))
    return True


def _add_answer(asked: Asked, conversation: _Conversation, outcome: Completion, tokenizer: Any) -> list[int]:
    assert isinstance(outcome, TimedCompletion)
    assert outcome.token_ids is not None
    ids, question_id = outcome.token_ids, conversation.question.question_id
    asked.answers.append(
        ServedAnswer(
            question_id, conversation.turn, conversation.prompt_ids, ids, outcome.first_token_s, outcome.rest_s
        )
    )
    text = tokenizer.decode(ids, skip_special_tokens=True).strip()
    conversation.history.append(Turn("assistant", text))
    return ids


def level_figures(asked: Asked, arm: str, temperature: float, concurrency: int) -> dict[str, Any]:
    """One arm at one temperature with so many requests at once."""
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
    """All None or empty where nothing was drafted."""
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
    """The same with `speedup`: tokens per second against the plain arm's at the same temperature and concurrency."""
    plain = {(row["temperature"], row["concurrency"]): row["tokens_per_s"] for row in levels if row["arm"] == PLAIN}
    rows = []
    for row in levels:
        base = plain.get((row["temperature"], row["concurrency"]))
        known = row["arm"] == DRAFTING and base and row["tokens_per_s"]
        rows.append({**row, "speedup": row["tokens_per_s"] / base if known else None})
    return rows
