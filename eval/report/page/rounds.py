"""Where the time of rounds goes: figure 1 of ParallelSpec (arXiv 2410.05589), from the measured loop's readings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.eval.bench.records import MethodRecord, QuestionRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.page.curves import Scale
from draftsmith.eval.report.summary import Row, by_temperature

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
class LaneRound:
    """tokens: kept in it; cut: it goes on after the picture's end."""

    parts: list[Part]
    middle: float
    tokens: int
    cut: bool


@dataclass(frozen=True)
class Lane:
    """A method's rounds on a clock; tokens: of the rounds that end within the picture, or a mean round's."""

    method: str
    rounds: list[LaneRound]
    tokens: float
    seconds: float


@dataclass(frozen=True)
class Lanes:
    """Methods at one temperature on a common clock. scale: in ms; target_s: a step of the target alone."""

    temperature: float
    scale: Scale
    rows: list[Lane]
    target_s: float
    question_id: int | str = ""
    category: str = ""


def mean_rounds(timing: list[Row]) -> list[Lanes]:
    """The mean round of each method, by temperature, the method with the least time per token first."""
    found = []
    for temperature, rows in by_temperature(timing).items():
        scale = Scale(0.0, max(1000 * sum(row[key] for key in TIMED) for row in rows) * 1.02)
        lanes = []
        for row in rows:
            seconds = [row[key] for key in TIMED]
            lanes.append(Lane(row["method"], [_round(seconds, 0.0, scale, 0)], row["tau"], sum(seconds)))
        lanes.sort(key=lambda lane: lane.seconds / lane.tokens)
        found.append(Lanes(temperature, scale, lanes, rows[0]["t_target_step_s"]))
    return found


def timeline(records: Sequence[QuestionRecord]) -> Lanes | None:
    """The first rounds of the question, in the first run, whose answers took the median time.

    Only the lowest temperature, each method's first turn; they begin together, at their first round. None if no record
    has readings.
    """
    if not records:
        return None
    temperature = min(answer.temperature for answer in records[0].answers.values())

    def answers_of(record: QuestionRecord) -> list[MethodRecord]:
        return [answer for answer in record.answers.values() if answer.temperature == temperature]

    usable = [
        record
        for record in records
        if record.run == records[0].run and all(answer.turns[0].phases_s for answer in answers_of(record))
    ]
    if not usable:
        return None
    usable.sort(key=lambda record: sum(answer.turns[0].wall_time_s for answer in record.answers.values()))
    record = usable[len(usable) // 2]
    answers = answers_of(record)
    steps = next(answer for answer in answers if answer.method == AUTOREGRESSIVE).turns[0].phases_s
    step_s = sum(map(sum, steps)) / len(steps)
    # As far as every method's readings go.
    window_s = min(WINDOW_STEPS * step_s, *(sum(map(sum, answer.turns[0].phases_s)) for answer in answers))
    scale = Scale(0.0, 1000 * window_s)
    lanes = [_lane(answer, scale) for answer in answers]
    lanes.sort(key=lambda lane: (lane.method != AUTOREGRESSIVE, -lane.tokens))
    return Lanes(temperature, scale, lanes, step_s, record.question_id, record.category)


def _lane(answer: MethodRecord, scale: Scale) -> Lane:
    turn, began_s, rounds = answer.turns[0], 0.0, []
    for seconds, kept in zip(turn.phases_s, turn.accept_lengths, strict=False):
        if 1000 * began_s >= scale.high * (1 - 1e-9):  # sums of readings are rounded
            break
        rounds.append(_round(seconds, began_s, scale, kept))
        began_s += sum(seconds)
    return Lane(answer.method, rounds, sum(each.tokens for each in rounds if not each.cut), began_s)


def _round(seconds: Sequence[float], began_s: float, scale: Scale, tokens: int) -> LaneRound:
    ended_s = began_s + sum(seconds)
    middle = (scale.percent(1000 * began_s) + scale.percent(1000 * ended_s)) / 2
    parts = []
    for phase, each in zip(PHASES, seconds, strict=True):
        start, end = (scale.percent(1000 * when) for when in (began_s, began_s + each))
        if end > start:
            parts.append(Part(phase, start, round(end - start, 2), each))
        began_s += each
    return LaneRound(parts, round(middle, 2), tokens, 1000 * ended_s > scale.high * (1 + 1e-9))
