"""Where the time of a round goes: the mean round of each method, and its first rounds on a common clock.

The second is figure 1 of ParallelSpec (arXiv 2410.05589), from the readings that the measured loop took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.bench.records import MethodRecord, QuestionRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.page.plot import Scale

PHASES = ("draft", "forward", "choose", "commit")
TIMED = ("t_draft_s", "t_verify_forward_s", "t_choose_s", "t_commit_s")
WINDOW_STEPS = 10.0  # steps of the target alone that a timeline is long, at most


@dataclass(frozen=True)
class Part:
    """One phase, in percent of the picture's width."""

    phase: str
    start: float
    width: float
    seconds: float


@dataclass(frozen=True)
class MeanRound:
    method: str
    temperature: float
    parts: list[Part]
    round_s: float
    tau: float

    @property
    def per_token_s(self) -> float:
        return self.round_s / self.tau


@dataclass(frozen=True)
class MeanRounds:
    """target: where a step of the target alone ends, in percent."""

    rows: list[MeanRound]
    scale: Scale  # in ms
    target: float
    target_s: float


@dataclass(frozen=True)
class TimelineRound:
    """tokens: kept in it; cut: it goes on behind the picture's end."""

    parts: list[Part]
    middle: float
    tokens: int
    cut: bool


@dataclass(frozen=True)
class TimelineRow:
    """tokens: of the rounds that end within the picture."""

    method: str
    rounds: list[TimelineRound]
    tokens: int


@dataclass(frozen=True)
class Timeline:
    question_id: int | str
    category: str
    temperature: float
    scale: Scale  # in ms
    rows: list[TimelineRow]


def mean_rounds(timing: list[dict[str, Any]]) -> list[MeanRounds]:
    """Of each temperature, the method with the least time per token first."""
    found = []
    for temperature in sorted({row["temperature"] for row in timing}):
        rows = [row for row in timing if row["temperature"] == temperature]
        longest_ms = max(1000 * sum(row[key] for key in TIMED) for row in rows)
        scale = Scale(0.0, longest_ms * 1.02)
        target_s = rows[0]["t_target_step_s"]
        shown = [
            MeanRound(
                row["method"],
                temperature,
                _parts([row[key] for key in TIMED], 0.0, scale),
                sum(row[key] for key in TIMED),
                row["tau"],
            )
            for row in rows
        ]
        shown.sort(key=lambda each: each.per_token_s)
        found.append(MeanRounds(shown, scale, scale.percent(1000 * target_s), target_s))
    return found


def timeline(records: Sequence[QuestionRecord]) -> Timeline | None:
    """Of the question, in the first run, whose answers took the median time; None if no record has readings.

    Only the lowest temperature, each method's first turn; they begin together, at their first round.
    """
    if not records:
        return None
    temperature = min(answer.temperature for answer in records[0].answers.values())
    usable = [record for record in records if record.run == records[0].run and _has_phases(record, temperature)]
    if not usable:
        return None
    usable.sort(key=lambda record: sum(answer.turns[0].wall_time_s for answer in record.answers.values()))
    record = usable[len(usable) // 2]
    answers = [answer for answer in record.answers.values() if answer.temperature == temperature]
    baseline = next(answer for answer in answers if answer.method == AUTOREGRESSIVE)
    steps = baseline.turns[0].phases_s
    step_s = sum(map(sum, steps)) / len(steps)
    # As far as every method's readings go.
    window_s = min(WINDOW_STEPS * step_s, *(sum(map(sum, answer.turns[0].phases_s)) for answer in answers))
    scale = Scale(0.0, 1000 * window_s)
    rows = [_timeline_row(answer, scale) for answer in answers]
    rows.sort(key=lambda row: (row.method != AUTOREGRESSIVE, -row.tokens))
    return Timeline(record.question_id, record.category, temperature, scale, rows)


def _has_phases(record: QuestionRecord, temperature: float) -> bool:
    """Of every answer's first turn, at one temperature at least."""
    answers = [answer for answer in record.answers.values() if answer.temperature == temperature]
    return all(answer.turns[0].phases_s for answer in answers)


def _timeline_row(answer: MethodRecord, scale: Scale) -> TimelineRow:
    turn, began_s, rounds, tokens = answer.turns[0], 0.0, [], 0
    for seconds, kept in zip(turn.phases_s, turn.accept_lengths, strict=False):
        if 1000 * began_s >= scale.high * (1 - 1e-9):  # sums of readings are rounded
            break
        ended_s = began_s + sum(seconds)
        cut = 1000 * ended_s > scale.high * (1 + 1e-9)
        middle = (scale.percent(1000 * began_s) + scale.percent(1000 * ended_s)) / 2
        rounds.append(TimelineRound(_parts(seconds, began_s, scale), round(middle, 2), kept, cut))
        tokens += 0 if cut else kept
        began_s = ended_s
    return TimelineRow(answer.method, rounds, tokens)


def _parts(seconds: Sequence[float], began_s: float, scale: Scale) -> list[Part]:
    parts = []
    for phase, each in zip(PHASES, seconds, strict=True):
        start, end = (scale.percent(1000 * when) for when in (began_s, began_s + each))
        if end > start:
            parts.append(Part(phase, start, round(end - start, 2), each))
        began_s += each
    return parts
