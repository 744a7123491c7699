"""How far a figure may be chance of the questions: percentile bootstrap over them (Efron, 1979).

Two methods that answered the same questions are compared with the same draws.

A question is drawn with all its turns and runs, as these are no independent evidence. The machine's own noise is in the
spread over runs, not here.

Shapes: Q questions, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from draftsmith.eval.bench.records import MethodRecord

RESAMPLES, LEVEL = 4000, 0.95
FEWEST_QUESTIONS = 2

Floats = NDArray[np.float64]
Figure = Callable[["QuestionSums", Floats], Floats]


@dataclass(frozen=True)
class QuestionSums:
    """Sums [Q] over a question's turns and runs, of a method's answers and of its baseline's."""

    kept: Floats  # tokens of rounds
    rounds: Floats
    tokens: Floats
    seconds: Floats
    baseline_tokens: Floats
    baseline_seconds: Floats

    @staticmethod
    def of(pairs_by_question: Sequence[Sequence[tuple[MethodRecord, MethodRecord]]]) -> QuestionSums:
        """Sum up, for each question, a method's answers beside the baseline's."""
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
        return QuestionSums(*np.array(rows, dtype=np.float64).T)


def tau(sums: QuestionSums, counts_rq: Floats) -> Floats:
    """tau [R] pooled over rounds; counts_rq: how often each question was drawn."""
    return (counts_rq @ sums.kept) / np.maximum(counts_rq @ sums.rounds, 1)


def speedup(sums: QuestionSums, counts_rq: Floats) -> Floats:
    """Speedup [R]: all tokens over all seconds, against the baseline's."""
    mine = (counts_rq @ sums.tokens) / (counts_rq @ sums.seconds)
    return mine / ((counts_rq @ sums.baseline_tokens) / (counts_rq @ sums.baseline_seconds))


def interval(figure: Figure, sums: QuestionSums) -> list[float] | None:
    """The interval that holds the figure with `LEVEL`, over questions like these. None: too few of them to say."""
    counts = resamples(len(sums.rounds))
    return None if counts is None else _ends(figure(sums, counts))


def paired_ratio(figure: Figure, mine: QuestionSums, other: QuestionSums) -> list[float] | None:
    """The interval of a method's figure over that of another, which answered the same questions in the same order.

    Raises:
        ValueError: They have not as many questions.
    """
    if len(mine.rounds) != len(other.rounds):
        raise ValueError(f"{len(mine.rounds)} questions cannot be paired with {len(other.rounds)}")
    counts = resamples(len(mine.rounds))
    return None if counts is None else _ends(figure(mine, counts) / figure(other, counts))


def every_question(questions: int) -> Floats:
    """Counts [1, Q] that draw each question once: the figure itself."""
    return np.ones((1, questions))


@lru_cache(maxsize=8)
def resamples(questions: int) -> Floats | None:
    """Counts [R, Q] of how often each question is drawn: the same for every method, which pairs them."""
    if questions < FEWEST_QUESTIONS:
        return None
    chance = np.random.default_rng(0)
    return chance.multinomial(questions, np.full(questions, 1 / questions), size=RESAMPLES).astype(np.float64)


def _ends(samples_r: Floats) -> list[float]:
    below = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(samples_r, [below, 100 - below])
    return [float(low), float(high)]
