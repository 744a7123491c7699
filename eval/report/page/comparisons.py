"""Comparisons of methods: overall, by category, by depth and by the phases of a round.

Functions choose and order rows of the summary and the timing; the templates place their figures on the scales, in
percent of the width, so that text keeps its size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report import bootstrap
from draftsmith.eval.report.sentences import FASTER, SLOWER, verdict_word
from draftsmith.eval.report.summary import (
    MEAN_OF_TASKS,
    OVERALL,
    Row,
    by_temperature,
    drafted_rows,
    headline,
    method_key,
    question_sums,
)

# Lower ends of a speedup's interval at which a cell gets the next tint.
LEVELS = (1.0, 1.25, 1.5, 2.0, 2.5)
MOST_DEPTHS = 8
SELDOM = 0.005  # share of all rounds below which a depth is not shown
# Phases of a round, and their keys in a row of the timing.
PHASES = {"draft": "t_draft_s", "forward": "t_verify_forward_s", "choose": "t_choose_s", "commit": "t_commit_s"}
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # between ticks, times a power of ten


@dataclass(frozen=True)
class Scale:
    """Axis of a chart from `low` to `high`; values outside are drawn at its ends."""

    low: float
    high: float

    def percent(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)

    def ticks(self) -> list[tuple[str, float]]:
        """Return (label, place in percent) of about five ticks at multiples of 1, 2, 2.5 or 5 times a power of ten."""
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in STEPS if power * factor >= raw * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [round(number * step, 10) for number in range(first, last + 1)]
        return [(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}", self.percent(value)) for value in values]


def method_tables(summary: list[Row], records: Sequence[QuestionRecord] = ()) -> list[dict[str, Any]]:
    """Compare the methods of each temperature, the lowest first, all on one scale.

    Args:
        records: The records of the summary; without them there are no paired intervals.

    Returns:
        For each temperature: `rows` of the summary, the fastest first; `tasks` in the headline's mean, 0 if it is
        pooled; `against_best`, by `method@temperature` the 95 % interval of its speedup over the fastest one's; and the
        `scale` of all speedups.
    """
    drafted = drafted_rows(summary)
    if not drafted:
        return []
    shown = list(map(headline, drafted))
    ends = [end for figures in shown for end in figures["speedup_interval"] or []]
    values = [1.0, *ends, *(figures["speedup_mean"] for figures in shown)]
    room = 0.06 * (max(values) - min(values)) or 0.5
    scale = Scale(min(values) - room, max(values) + room)
    baselines = {
        row["temperature"]: row["tokens_per_s"]
        for row in summary
        if row["category"] == OVERALL and row["method"] == AUTOREGRESSIVE
    }
    tables = []
    for temperature, rows in by_temperature(drafted).items():
        rows.sort(key=lambda row: -headline(row)["speedup_mean"])
        keys = [method_key(row) for row in rows if records]
        sums = {key: question_sums(list(records), key, over_tasks=True) for key in keys}
        best = sums.get(method_key(rows[0]))
        against = {
            key: None if best is None or each is best else bootstrap.paired_ratio(bootstrap.speedup, each, best)
            for key, each in sums.items()
        }
        tasks = (rows[0].get("over_tasks") or {}).get("tasks", 0)
        table = {"temperature": temperature, "baseline_tokens_per_s": baselines.get(temperature), "scale": scale}
        tables.append({**table, "rows": rows, "tasks": tasks, "against_best": against})
    return tables


def category_tables(
    summary: list[Row], categories: list[str]
) -> list[tuple[float, list[tuple[Row, list[Row | None]]]]]:
    """List for each temperature every method's overall row, the fastest first, with its row of each category."""
    cells = {(method_key(row), row["category"]): row for row in summary}
    cells |= {(method_key(row), MEAN_OF_TASKS): headline(row) for row in drafted_rows(summary)}
    return [
        (
            temperature,
            [
                (row, [cells.get((method_key(row), category)) for category in categories])
                for row in sorted(rows, key=lambda row: -headline(row)["speedup_mean"])
            ],
        )
        for temperature, rows in by_temperature(drafted_rows(summary)).items()
    ]


def tint(row: Row) -> str:
    """Return a cell's CSS class by the interval of its speedup; "plain" if it shows neither gain nor loss."""
    word, ends = verdict_word(row["speedup_interval"]), row["speedup_interval"]
    if word == SLOWER:
        return "slow"
    return f"level-{sum(ends[0] >= level for level in LEVELS)}" if word == FASTER else "plain"


def acceptance_depths(timing: list[Row]) -> list[Row]:
    """Return the timing rows of drafting methods with their acceptance by depth, by temperature, largest tau first.

    `shares` has for each depth from 1 on (share of all rounds that accepted it, share of the rounds that accepted the
    depth before); `more` is the number of deeper depths, which few rounds reach.
    """
    depths = []
    for row in timing:
        conditional = row["acceptance_by_depth"]
        if row["method"] == AUTOREGRESSIVE or not conditional:
            continue
        marginal = list(accumulate(conditional, mul))  # falls with depth, so that the shown depths are the first ones
        count = max(1, sum(share >= SELDOM for share in marginal[:MOST_DEPTHS]))
        shares = list(zip(marginal, conditional, strict=True))[:count]
        # The sum over depths d of the share of rounds with at least d accepted tokens is their mean number.
        depths.append(row | {"tau_without_bonus": sum(marginal), "shares": shares, "more": len(marginal) - count})
    return sorted(depths, key=lambda row: (row["temperature"], -row["tau_without_bonus"]))


def mean_rounds(timing: list[Row]) -> list[tuple[float, Scale, list[Row]]]:
    """Return (temperature, scale in ms, timing rows with `round_s` added); rows with least time per token first."""
    pictures = []
    for temperature, rows in by_temperature(timing).items():
        rows = [row | {"round_s": sum(row[key] for key in PHASES.values())} for row in rows]
        scale = Scale(0.0, max(1000 * row["round_s"] for row in rows) * 1.02)
        pictures.append((temperature, scale, sorted(rows, key=lambda row: row["round_s"] / row["tau"])))
    return pictures
