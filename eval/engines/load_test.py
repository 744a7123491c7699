"""Send every question to an engine at a given concurrency, and compute the figures of its answers.

A turn is sent as soon as the previous answer is complete. Prompts and histories are built as in
`eval/bench/spec_bench.py`, so that the same answers give the same prompts.

tau                   1 + accepted / drafts, over all drafts together, as vLLM logs it
tau_committed         tokens committed per round, without tokens accepted past an answer's end, and with the rounds in
                      which nothing was drafted (no n-gram was found): our own decoder's tau
acceptance_by_depth   share of all drafts whose token at depth 1, 2, ... was accepted
tokens_per_s          generated tokens of all answers / seconds from the first request to the last answer
user_tokens_per_s     tokens per second of one answer, of its whole time; median over answers
first_token_s         median over answers
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from draftsmith.data.engines.engine import Failure, GenerationSettings, Request
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import Question
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.bench.spec_bench import FEWEST_NEW_TOKENS, request_seed
from draftsmith.eval.engines.endpoint import DraftCounts, Endpoint, TimedAnswer
from draftsmith.eval.report.text import milliseconds, number
from draftsmith.files import read_json
from draftsmith.progress import progress_bar
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

PLAIN, NGRAM, DRAFTING = "without drafter", "n-gram lookup", "with drafter"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}  # name on the command line: name in texts
DEFINITIONS = (
    "tau = 1 + accepted / drafts as the engine counts them, over all drafts together; committed: without tokens "
    "accepted past an answer's end and with rounds without a draft, which is draftsmith's tau. Accepted at depth 1, "
    "2, ...: share of drafts whose token was accepted. concurrency: concurrent questions; first token, and tokens/s of "
    "a user (of an answer, over its whole time): median over answers."
)


@dataclass(frozen=True)
class TurnAnswer(TimedAnswer):
    """The answer to one turn, with its prompt and times."""

    question_id: int | str
    turn: int
    prompt_ids: list[int]


@dataclass
class LoadTestRow:
    """Figures of one measured arm at one temperature and concurrency; the module's docstring defines them.

    arm: `without drafter`, `n-gram lookup` or `with drafter`. failures: number of failed answers by reason. Figures
    about drafts are None or empty if nothing was drafted.
    """

    arm: str
    temperature: float
    concurrency: int
    tokens_per_s: float | None = None
    first_token_s: float | None = None
    tau: float | None = None
    tau_committed: float | None = None
    acceptance_by_depth: list[float] = field(default_factory=list)
    speedup: float | None = None
    user_tokens_per_s: float | None = None
    failures: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    turns_left_out: int = 0
    tokens: int = 0
    wall_time_s: float = 0.0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def label(self) -> str:
        return f"{self.arm}, T={self.temperature:g}, concurrency {self.concurrency}"

    def compute(self, answers: list[TurnAnswer], counts: DraftCounts) -> None:
        """Compute the figures from `tokens`, `wall_time_s`, the answers, and the engine's counts of their drafts."""
        self.answers = len(answers)
        committed = self.tokens - self.answers  # a prompt gives each answer's first token
        rounds = max(counts.drafts, committed - counts.accepted_tokens)
        self.drafts = counts.drafts
        self.drafted_tokens = counts.drafted_tokens
        self.accepted_tokens = counts.accepted_tokens
        self.tau = counts.tau
        self.tau_committed = committed / rounds if counts.drafts else None
        self.acceptance_by_depth = counts.acceptance_by_depth
        self.tokens_per_s = self.tokens / self.wall_time_s if self.wall_time_s > 0 else None
        if answers:
            self.first_token_s = statistics.median(answer.first_token_s for answer in answers)
            self.user_tokens_per_s = statistics.median(
                len(answer.ids) / (answer.first_token_s + answer.rest_s) for answer in answers
            )

    @property
    def cells(self) -> dict[str, str]:
        """Return the texts of this row's cells in the tables, by column heading."""
        return {
            "arm": self.arm,
            "T": f"{self.temperature:g}",
            "concurrency": str(self.concurrency),
            "tokens/s": number(self.tokens_per_s, 1),
            "speedup": number(self.speedup),
            "tokens/s of a user": number(self.user_tokens_per_s, 1),
            "first token, ms": milliseconds(self.first_token_s, 1),
            "failed": str(sum(self.failures.values())),
            "tau": number(self.tau),
            "committed": number(self.tau_committed),
            "accepted at depth": " ".join(map(number, self.acceptance_by_depth)) or "-",
        }


CLOCK = ("arm", "T", "concurrency", "tokens/s", "speedup", "tokens/s of a user", "first token, ms", "failed")
DRAFTS = ("arm", "T", "concurrency", "tau", "committed", "accepted at depth")


@dataclass
class EngineMeasurement:
    """Result of a load test in one engine (vLLM, SGLang or llama.cpp).

    place: which servers were measured, in words. notes: remarks for the reader. greedy: comparisons of greedy answers
    with and without the drafter. own_chain: acceptance in the engine, compared with draftsmith's own decoding loop.
    """

    place: str
    rows: list[LoadTestRow]
    notes: list[str]
    questions: int = 0
    engine: str = ENGINES["vllm"]
    greedy: list[dict[str, Any]] = field(default_factory=list)
    own_chain: dict[str, Any] | None = None
    definitions: ClassVar[str] = DEFINITIONS

    def tables(self) -> list[tuple[tuple[str, ...], list[list[str]]]]:
        """Return (headings, rows of cells) of two tables: one of times, one of drafts without the plain arm."""
        shown = ((CLOCK, self.rows), (DRAFTS, [row for row in self.rows if row.arm != PLAIN]))
        return [
            (headings, [[row.cells[name] for name in headings] for row in rows]) for headings, rows in shown if rows
        ]


def load_engine_measurements(recipe: Recipe) -> list[EngineMeasurement]:
    """Read the stored results of this run's load tests in engines.

    Raises:
        UserError: A file of results is damaged.
    """
    files = [(name, measurement_file(recipe, name, given)) for name in ENGINES for given in (False, True)]
    way_out = "delete {} and run `draftsmith bench --engine {}` again"
    return [
        read_json(file, EngineMeasurement, way_out.format(file.name, name), "figures")
        for name, file in files
        if file.is_file()
    ]


def measurement_file(recipe: Recipe, engine: str, given: bool) -> Path:
    """Return the path of the JSON file with a load test's result.

    Args:
        given: Whether the servers were given by URL, instead of started for the load test.
    """
    return RunFolder(recipe).eval / f"{engine}{'-server' if given else ''}.json"


@dataclass
class ArmResult:
    """Answers of one arm to all questions, at one temperature and concurrency, with their figures.

    counts: the engine's counts while they were generated.
    """

    row: LoadTestRow
    answers: list[TurnAnswer]
    counts: DraftCounts


def send_questions(
    endpoint: Endpoint,
    tokenizer: Any,
    questions: list[Question],
    settings: GenerationSettings,
    seed: int,
    concurrency: int,
    arm: str = "",
) -> ArmResult:
    """Send all questions to a server and wait for the last answer. A failed answer ends its conversation.

    Args:
        concurrency: Number of conversations in flight.
        arm: Name of the measured arm; if empty, no progress bar is drawn.

    Raises:
        UserError: The server rejects the settings that all requests share, or lacks token ids or counters.
    """
    row, answers = LoadTestRow(arm, settings.temperature, concurrency), list[TurnAnswer]()

    async def converse(question: Question) -> None:
        history: list[Turn] = []
        for turn, text in enumerate(question.turns):
            history.append(Turn("user", text))
            prompt_ids = prompt_token_ids(tokenizer, history)
            most = settings.max_new_tokens
            room = most if endpoint.max_length_tokens is None else endpoint.max_length_tokens - len(prompt_ids)
            if room < min(most, FEWEST_NEW_TOKENS):
                row.turns_left_out += len(question.turns) - turn
                return
            own_seed = request_seed(seed, 0, question.question_id, turn, f"engine@{settings.temperature:g}")
            bounded = replace(settings, max_new_tokens=min(most, room))
            answer = await endpoint.answer(Request(f"{question.question_id}/{turn}", prompt_ids, bounded, own_seed))
            if isinstance(answer, Failure):
                row.failures[answer.reason] = row.failures.get(answer.reason, 0) + 1
                return
            times_s = answer.first_token_s, answer.rest_s
            answers.append(TurnAnswer(answer.ids, *times_s, question.question_id, turn, prompt_ids))
            history.append(Turn("assistant", tokenizer.decode(answer.ids, skip_special_tokens=True).strip()))

    async def work(waiting: Iterator[Question]) -> None:
        for question in waiting:
            await converse(question)
            progress.update()

    async def all_of() -> None:
        waiting = iter(questions)
        await asyncio.gather(*(work(waiting) for _ in range(concurrency)))

    before = endpoint.counts()
    with progress_bar(len(questions), row.label, "question", shown=bool(arm)) as progress:
        started = time.perf_counter()
        endpoint.run(all_of())
        row.wall_time_s = time.perf_counter() - started
    row.tokens = sum(len(answer.ids) for answer in answers)
    counts = endpoint.counts(before.generated_tokens + row.tokens) - before
    row.compute(answers, counts)
    return ArmResult(row, answers, counts)


def with_speedups(rows: list[LoadTestRow]) -> list[LoadTestRow]:
    """Set each row's `speedup` over the arm without drafter, all else equal; None where an answer failed."""
    whole = [row for row in rows if not row.failures]
    plain = {(row.temperature, row.concurrency): row.tokens_per_s for row in whole if row.arm == PLAIN}
    for row in whole:
        base = plain.get((row.temperature, row.concurrency))
        row.speedup = row.tokens_per_s / base if row.arm != PLAIN and base and row.tokens_per_s else None
    return rows
