"""All methods beside each other, fastest first: their figures with intervals, and each against the fastest, paired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report import bootstrap
from draftsmith.eval.report.page.plot import Scale, scale_around
from draftsmith.eval.report.page.verdict import TONES, verdict_word
from draftsmith.eval.report.summary import OVERALL, question_sums


@dataclass(frozen=True)
class MethodRow:
    """row: of the summary; against_best: 95 % of its speedup over the fastest one's; at, low, high: in percent."""

    row: dict[str, Any]
    tone: str
    word: str
    against_best: list[float] | None
    at: float
    low: float
    high: float


@dataclass(frozen=True)
class MethodTable:
    """Of one temperature. scale: of the speedups; one: where 1 lies on it, in percent."""

    temperature: float
    baseline_tokens_per_s: float | None
    rows: list[MethodRow]
    scale: Scale
    one: float


def method_tables(summary: list[dict[str, Any]], records: Sequence[QuestionRecord] = ()) -> list[MethodTable]:
    """Of each temperature, the lowest first, all on one scale.

    Args:
        summary: Rows of `summarize`.
        records: What they are of; without them nothing is paired.
    """
    overall = [row for row in summary if row["category"] == OVERALL]
    drafted = [row for row in overall if row["method"] != AUTOREGRESSIVE]
    if not drafted:
        return []
    ends = [end for row in drafted for end in (row["speedup_interval"] or [row["speedup_mean"]])]
    scale = scale_around([*ends, *(row["speedup_mean"] for row in drafted)], 1.0)
    tables = []
    for temperature in sorted({row["temperature"] for row in drafted}):
        rows = [row for row in drafted if row["temperature"] == temperature]
        rows.sort(key=lambda row: -row["speedup_mean"])
        speeds = (row["tokens_per_s"] for row in overall if _is_baseline(row, temperature))
        tables.append(
            MethodTable(
                temperature,
                next(speeds, None),
                [_method_row(row, rows[0], records, scale) for row in rows],
                scale,
                scale.percent(1.0),
            )
        )
    return tables


def _is_baseline(row: dict[str, Any], temperature: float) -> bool:
    return (row["method"], row["temperature"]) == (AUTOREGRESSIVE, temperature)


def _method_row(
    row: dict[str, Any], best: dict[str, Any], records: Sequence[QuestionRecord], scale: Scale
) -> MethodRow:
    word = verdict_word(row["speedup_interval"])
    low, high = row["speedup_interval"] or [row["speedup_mean"]] * 2
    against = None
    if records and row is not best:
        mine, others = (question_sums(list(records), _key(each)) for each in (row, best))
        against = bootstrap.paired_ratio(bootstrap.speedup, mine, others)
    return MethodRow(
        row, TONES[word], word, against, scale.percent(row["speedup_mean"]), scale.percent(low), scale.percent(high)
    )


def _key(row: dict[str, Any]) -> str:
    return f"{row['method']}@{row['temperature']:g}"
