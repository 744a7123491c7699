"""Send every question to an engine at a given concurrency, and compute the figures of its answers.

A turn is sent as soon as the previous answer is complete. Prompts and histories are built as in
`eval/bench/spec_bench.py`, so that the same answers give the same prompts.

tau                   1 + accepted / drafts, over all drafts together, as vLLM logs it
tau_by_question       mean over questions of the tau of each, as in papers and SpecForge; at concurrency 1 only
tau_committed         tokens committed per draft, without tokens accepted past an answer's end: our own decoder's tau
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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from draftsmith.data.engines.engine import Failure, GenerationSettings, Request
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import Question
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.bench.spec_bench import FEWEST_NEW_TOKENS, request_seed
from draftsmith.eval.report.text import milliseconds, number
from draftsmith.eval.serving.endpoint import DraftCounts, Endpoint, TimedAnswer
from draftsmith.files import read_json
from draftsmith.progress import progress_bar
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

PLAIN, DRAFTING = "without drafter", "with drafter"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}  # name on the command line: name in texts
DEFINITIONS = (
    "tau = 1 + accepted / drafts as the engine counts them, over all drafts together; by question: the mean of the "
    "questions' tau, at concurrency 1; committed: without tokens accepted past an answer's end, which is draftsmith's "
    "tau. Accepted at depth 1, 2, ...: share of drafts whose token was accepted; given the depth before: of the "
    "drafts whose token one depth before was accepted. concurrency: concurrent questions; first token and ms per "
    "token: medians over answers."
)


@dataclass(frozen=True)
class TurnAnswer(TimedAnswer):
    """The answer to one turn, with its prompt and times."""

    question_id: int | str
    turn: int
    prompt_ids: list[int]


@dataclass
class LoadTestRow:
    """Figures of one arm at one temperature and concurrency, defined in the module's docstring.

    failures: number of failed answers by reason.
    """

    arm: str
    temperature: float
    concurrency: int
    tokens_per_s: float | None
    time_per_output_token_s: float | None
    first_token_s: float | None
    tau: float | None
    tau_by_question: float | None
    tau_committed: float | None
    acceptance_by_depth: list[float]
    acceptance_conditional: list[float | None]
    speedup: float | None = None
    failures: dict[str, int] = field(default_factory=dict)
    first_token_p90_s: float | None = None
    answers: int = 0
    turns_left_out: int = 0
    tokens: int = 0
    wall_time_s: float = 0.0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def cells(self) -> dict[str, str]:
        """Return the cells of the tables by heading."""
        return {
            "arm": self.arm,
            "T": f"{self.temperature:g}",
            "concurrency": str(self.concurrency),
            "tokens/s": number(self.tokens_per_s, 1),
            "speedup": number(self.speedup),
            "ms per token": milliseconds(self.time_per_output_token_s),
            "first token, ms": milliseconds(self.first_token_s, 1),
            "failed": str(sum(self.failures.values())),
            "tau": number(self.tau),
            "by question": number(self.tau_by_question),
            "committed": number(self.tau_committed),
            "accepted at depth": " ".join(map(number, self.acceptance_by_depth)) or "-",
            "given the depth before": " ".join(map(number, self.acceptance_conditional)) or "-",
        }


CLOCK = ("arm", "T", "concurrency", "tokens/s", "speedup", "ms per token", "first token, ms", "failed")
DRAFTS = ("arm", "T", "concurrency", "tau", "by question", "committed", "accepted at depth", "given the depth before")


@dataclass
class EngineMeasurement:
    """Result of a measurement in an engine.

    place: which servers were measured, in words. notes: remarks for the reader. greedy: comparisons of greedy answers
    with and without the drafter.
    """

    place: str
    rows: list[LoadTestRow]
    notes: list[str]
    questions: int = 0
    engine: str = ENGINES["vllm"]
    greedy: list[dict[str, Any]] = field(default_factory=list)
    definitions: ClassVar[str] = DEFINITIONS

    def tables(self) -> list[tuple[tuple[str, ...], list[list[str]]]]:
        """Return headings and cells of two tables: times, and drafts."""
        shown = ((CLOCK, self.rows), (DRAFTS, [row for row in self.rows if row.arm != PLAIN]))
        return [
            (headings, [[row.cells[name] for name in headings] for row in rows]) for headings, rows in shown if rows
        ]


def load_engine_measurements(recipe: Recipe) -> list[EngineMeasurement]:
    """Read the results of earlier measurements in engines.

    Raises:
        UserError: A file is damaged.
    """
    files = [(name, measurement_file(recipe, name, given)) for name in ENGINES for given in (False, True)]
    way_out = "delete {} and run `draftsmith eval --engine {}` again"
    return [
        read_json(file, EngineMeasurement, way_out.format(file.name, name), "figures")
        for name, file in files
        if file.is_file()
    ]


def measurement_file(recipe: Recipe, engine: str, given: bool) -> Path:
    """Return the file of a measurement in an engine.

    Args:
        given: The servers were given by URL, not started for the measurement.
    """
    return RunFolder(recipe).eval / f"{engine}{'-server' if given else ''}.json"


@dataclass
class ArmResult:
    """Answers of one arm to all questions, at one temperature and concurrency.

    failures: number of failed answers by reason. by_question: the engine's counts for each question, at concurrency 1.
    """

    arm: str
    temperature: float
    concurrency: int
    answers: list[TurnAnswer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    turns_left_out: int = 0
    wall_time_s: float = 0.0
    counts: DraftCounts = field(default_factory=DraftCounts)
    by_question: list[DraftCounts] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.arm}, T={self.temperature:g}, concurrency {self.concurrency}"

    @property
    def tokens(self) -> int:
        return sum(len(answer.ids) for answer in self.answers)

    def row(self) -> LoadTestRow:
        """Compute the figures; those of drafting are None or empty if nothing was drafted."""
        counts, tokens = self.counts, self.tokens
        taus = [counted.tau for counted in self.by_question if counted.tau is not None]
        first = [answer.first_token_s for answer in self.answers]
        rest = [answer.rest_s / (len(answer.ids) - 1) for answer in self.answers if len(answer.ids) > 1]
        return LoadTestRow(
            arm=self.arm,
            temperature=self.temperature,
            concurrency=self.concurrency,
            tokens_per_s=tokens / self.wall_time_s if self.wall_time_s > 0 else None,
            first_token_s=statistics.median(first) if first else None,
            first_token_p90_s=float(np.percentile(first, 90)) if first else None,
            time_per_output_token_s=statistics.median(rest) if rest else None,
            tau=counts.tau,
            tau_by_question=statistics.fmean(taus) if taus else None,
            tau_committed=(tokens - len(self.answers)) / counts.drafts if counts.drafts else None,
            acceptance_by_depth=counts.acceptance_by_depth,
            acceptance_conditional=counts.acceptance_conditional,
            failures=dict(self.failures),
            answers=len(self.answers),
            turns_left_out=self.turns_left_out,
            tokens=tokens,
            wall_time_s=self.wall_time_s,
            drafts=counts.drafts,
            drafted_tokens=counts.drafted_tokens,
            accepted_tokens=counts.accepted_tokens,
        )


def send_questions(
    endpoint: Endpoint,
    tokenizer: Any,
    questions: list[Question],
    settings: GenerationSettings,
    seed: int,
    concurrency: int,
    arm: str = "",
) -> ArmResult:
    """Send all questions and wait for the last answer. A conversation ends at an answer that fails.

    Args:
        concurrency: Number of conversations in flight.
        arm: Name of the measured arm; without one no progress bar is drawn.

    Raises:
        UserError: The engine cannot continue.
    """
    result = ArmResult(arm, settings.temperature, concurrency)

    async def converse(question: Question) -> None:
        history: list[Turn] = []
        for turn, text in enumerate(question.turns):
            history.append(Turn("user", text))
            prompt_ids = prompt_token_ids(tokenizer, history)
            most = settings.max_new_tokens
            room = most if endpoint.max_length_tokens is None else endpoint.max_length_tokens - len(prompt_ids)
            if room < min(most, FEWEST_NEW_TOKENS):
                result.turns_left_out += len(question.turns) - turn
                return
            own_seed = request_seed(seed, 0, question.question_id, turn, f"engine@{settings.temperature:g}")
            bounded = replace(settings, max_new_tokens=min(most, room))
            answer = await endpoint.answer(Request(f"{question.question_id}/{turn}", prompt_ids, [], bounded, own_seed))
            if isinstance(answer, Failure):
                result.failures[answer.reason] += 1
                return
            times_s = answer.first_token_s, answer.rest_s
            result.answers.append(TurnAnswer(answer.ids, *times_s, question.question_id, turn, prompt_ids))
            history.append(Turn("assistant", tokenizer.decode(answer.ids, skip_special_tokens=True).strip()))

    async def work(waiting: Iterator[Question]) -> None:
        for question in waiting:
            await converse(question)
            progress.update()

    async def all_of(group: list[Question]) -> None:
        waiting = iter(group)
        await asyncio.gather(*(work(waiting) for _ in range(concurrency)))

    before = latest = endpoint.counts()
    with progress_bar(len(questions), result.label, "question", shown=bool(arm)) as progress:
        for group in [[question] for question in questions] if concurrency == 1 else [questions]:
            started = time.perf_counter()
            endpoint.run(all_of(group))
            result.wall_time_s += time.perf_counter() - started
            now = endpoint.counts(before.generated_tokens + result.tokens)
            if concurrency == 1:
                result.by_question.append(now - latest)
            latest = now
    result.counts = latest - before
    return result


def with_speedups(rows: list[LoadTestRow]) -> list[LoadTestRow]:
    """Set `speedup`: tokens per second over the plain arm's at the same temperature and concurrency."""
    plain = {(row.temperature, row.concurrency): row.tokens_per_s for row in rows if row.arm == PLAIN}
    for row in rows:
        base = plain.get((row.temperature, row.concurrency))
        row.speedup = row.tokens_per_s / base if row.arm != PLAIN and base and row.tokens_per_s else None
    return rows
