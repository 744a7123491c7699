"""Confidence intervals of figures by a studentised bootstrap over questions (Efron, Tibshirani, 1993, 12.5).

A figure is a ratio of sums over questions. The bootstrap works on its logarithm, whose error the delta method gives,
for each resample too; the interval comes from the quantiles of (resampled figure - figure) / resampled error.
The percentile bootstrap, which gives narrower intervals, covers the true value in 83 of 100 cases at 5 questions, 90 at
13, and 88 at ten of each of six tasks; this one in 93, 94 and 93 (`docs/results/machinery/interval_coverage.json`).

Two methods that answered the same questions are compared with the same resamples.

A question is drawn with all its turns and runs, as these are not independent. The machine's noise shows in the spread
over runs, not here.

Shapes: Q questions, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftsmith.eval.bench.records import MethodResult

RESAMPLES, LEVEL = 4000, 0.95
# Resamples of fewer questions too often hold a single one, whose error is 0.
FEWEST_QUESTIONS = 5
# Errors of the logarithm below this are rounding.
NO_ERROR = 1e-12

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class QuestionSums:
    """Sums [Q] over each question's turns and runs, for a method's answers and the baseline's."""

    committed: Floats  # tokens that rounds committed
    rounds: Floats
    tokens: Floats
    seconds: Floats
    baseline_tokens: Floats
    baseline_seconds: Floats
    # The task of each question, to give all tasks equal weight whatever the length of answers; None pools all
    # questions.
    tasks: tuple[str, ...] | None = None

    @staticmethod
    def of(
        pairs_by_question: Sequence[Sequence[tuple[MethodResult, MethodResult]]], tasks: Sequence[str] | None = None
    ) -> QuestionSums:
        """Build the sums from each question's pairs (a method's answers, the baseline's answers)."""
        rows = []
        for pairs in pairs_by_question:
            turns = [turn for answer, _ in pairs for turn in answer.turns]
            baseline = [turn for _, answer in pairs for turn in answer.turns]
            rows.append(
                (
                    sum(sum(turn.accept_lengths) for turn in turns),
                    sum(turn.rounds for turn in turns),
                    sum(len(turn.ids) for turn in turns),
                    sum(turn.wall_time_s for turn in turns),
                    sum(len(turn.ids) for turn in baseline),
                    sum(turn.wall_time_s for turn in baseline),
                )
            )
        committed, rounds, tokens, seconds, baseline_tokens, baseline_seconds = np.array(rows, dtype=np.float64).T
        in_order = None if tasks is None else tuple(tasks)
        return QuestionSums(committed, rounds, tokens, seconds, baseline_tokens, baseline_seconds, in_order)

    @property
    def strata(self) -> tuple[str, ...]:
        """Return the task of each question, or an empty name for all questions if they are pooled."""
        return self.tasks or ("",) * len(self.rounds)

    def by_task(self) -> Iterator[tuple[NDArray[np.intp], QuestionSums]]:
        """Yield (indices, sums) of each task's questions, or once of all questions if they are pooled."""
        for task in dict.fromkeys(self.strata):
            places = np.flatnonzero([each == task for each in self.strata])
            sums = {each.name: getattr(self, each.name)[places] for each in fields(self) if each.name != "tasks"}
            yield places, replace(self, tasks=None, **sums)


class Ratio(NamedTuple):
    """A figure: the product of the sums (of `QuestionSums`) in `over`, divided by that of the sums in `under`."""

    over: tuple[str, ...]
    under: tuple[str, ...]


# Tokens per round; tokens per second over the baseline's.
tau = Ratio(("committed",), ("rounds",))
speedup = Ratio(("tokens", "baseline_seconds"), ("seconds", "baseline_tokens"))


def compute_ratio(figure: Ratio, sums: QuestionSums) -> float:
    """Compute a figure (`tau` or `speedup`) over all questions: pooled, or as the mean over tasks."""
    log_r, _ = _log_and_influence(figure, sums, np.ones((1, len(sums.rounds))))
    return float(np.exp(log_r[0]))


def interval(figure: Ratio, sums: QuestionSums) -> list[float] | None:
    """Return the confidence interval of the figure at `LEVEL`, over questions; None for too few questions."""
    ends = _ends([(figure, sums, 1.0)])
    lowest = 1.0 if figure == tau else 0.0  # a round commits at least the target's own token
    return None if ends is None else [max(lowest, end) for end in ends]


def paired_ratio(figure: Ratio, mine: QuestionSums, other: QuestionSums) -> list[float] | None:
    """Return the interval of `mine`'s figure / `other`'s, for the same questions in the same order; None for too few.

    Raises:
        ValueError: The numbers of questions differ.
    """
    if len(mine.rounds) != len(other.rounds):
        raise ValueError(f"{len(mine.rounds)} questions cannot be paired with {len(other.rounds)}")
    return _ends([(figure, mine, 1.0), (figure, other, -1.0)])


@lru_cache(maxsize=8)
def resamples(tasks: tuple[str, ...]) -> Floats:
    """Return how often each resample has each question [R, Q], with each task's share fixed; equal for all methods."""
    chance, counts_rq = np.random.default_rng(0), np.empty((RESAMPLES, len(tasks)))
    for task in dict.fromkeys(tasks):
        places = np.flatnonzero([each == task for each in tasks])
        counts_rq[:, places] = chance.multinomial(len(places), np.full(len(places), 1 / len(places)), size=RESAMPLES)
    return counts_rq


def _log_and_influence(figure: Ratio, sums: QuestionSums, counts_rq: Floats) -> tuple[Floats, Floats]:
    """Return the figure's logarithm [R], and its derivatives [R, Q] by each question's weight."""
    figures, influence_rq = [], np.empty_like(counts_rq)
    tasks = list(sums.by_task())
    for places, own in tasks:
        counts, log_r = counts_rq[:, places], np.zeros(len(counts_rq))
        derivative = np.zeros_like(counts)
        for names, sign in ((figure.over, 1.0), (figure.under, -1.0)):
            for values in (getattr(own, name) for name in names):
                total_r = counts @ values
                log_r += sign * np.log(total_r)
                derivative += sign * values / total_r[:, None]
        figures.append(np.exp(log_r))
        influence_rq[:, places] = figures[-1][:, None] * derivative
    mean_r = np.mean(figures, axis=0)
    return np.log(mean_r), influence_rq / (len(tasks) * mean_r[:, None])


def _ends(terms: Sequence[tuple[Ratio, QuestionSums, float]]) -> list[float] | None:
    """Return the interval of the product of figures, each to the power of +1 or -1."""
    sums = terms[0][1]
    if len(sums.rounds) < FEWEST_QUESTIONS:
        return None
    tasks = sums.strata
    # The variance of a task with n questions is too small by the factor (n - 1) / n; with one question it is unknown.
    questions_per_task = np.array([tasks.count(task) for task in tasks])
    if questions_per_task.min() < 2:
        return None

    def log_and_error(counts_rq: Floats) -> tuple[Floats, Floats]:
        parts = [(sign, *_log_and_influence(figure, each, counts_rq)) for figure, each, sign in terms]
        influence_rq = np.sum([sign * influence for sign, _, influence in parts], axis=0)
        variance_r = (counts_rq * influence_rq**2) @ (questions_per_task / (questions_per_task - 1))
        return np.sum([sign * log_r for sign, log_r, _ in parts], axis=0), np.sqrt(variance_r)

    with np.errstate(divide="ignore", invalid="ignore"):  # a resample without any round has no tau and is left out
        (log,), (error,) = log_and_error(np.ones((1, len(questions_per_task))))
        logs_r, errors_r = log_and_error(resamples(tasks))
    if not np.isfinite(error):
        return None
    if error < NO_ERROR:
        return [float(np.exp(log))] * 2
    known = errors_r > NO_ERROR  # False for NaN
    below = 100 * (1 - LEVEL) / 2
    low, high = np.percentile((logs_r[known] - log) / errors_r[known], [below, 100 - below])
    return [float(np.exp(log - high * error)), float(np.exp(log - low * error))]
