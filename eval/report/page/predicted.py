"""Predicted beside measured: what the clock of a round promises, what theory does, and Leviathan's curves.

The curves are figures 2, 3 and 4 of arXiv 2211.17192, as in `theory_charts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.page.plot import LineChart, Point, Scale, line_chart, scale_around
from draftsmith.eval.report.theory_charts import (
    ALPHAS,
    COSTS,
    GAMMAS,
    best_gamma_curve,
    operations_curve,
    speedup_curve,
    tokens_curve,
)

MOST_GAMMA = 30.0  # of the chart of best gammas
MOST_TIMES = 8.0  # of the others


@dataclass(frozen=True)
class Prediction:
    """row: of the timing; places in percent: by the clock of a round, by theorem 3.8, and as measured."""

    row: dict[str, Any]
    by_clock: float
    by_theory: float
    measured: float


@dataclass(frozen=True)
class Predictions:
    rows: list[Prediction]
    scale: Scale
    one: float


def predictions(timing: list[dict[str, Any]]) -> Predictions | None:
    """Of every method that drafts, the fastest first; None if there is none.

    Args:
        timing: Rows of `summarize_timing`.
    """
    rows = [row for row in timing if row["method"] != AUTOREGRESSIVE]
    if not rows:
        return None
    keys = ("speedup_predicted", "speedup_predicted_iid", "speedup_decoding")
    scale = scale_around([row[key] for row in rows for key in keys], 1.0)
    rows = sorted(rows, key=lambda row: (row["temperature"], -row["speedup_decoding"]))
    found = [Prediction(row, *(scale.percent(row[key]) for key in keys)) for row in rows]
    return Predictions(found, scale, scale.percent(1.0))


def theory_charts(timing: list[dict[str, Any]]) -> list[LineChart]:
    """Figures 2, 3 and both halves of 4, with what was measured as dots."""
    rows = [row for row in timing if row["method"] != AUTOREGRESSIVE]
    times = Scale(1.0, MOST_TIMES)
    return [
        _chart("Figure 2: expected tokens per round", GAMMAS, "γ", tokens_curve, times, rows, "tau"),
        _chart("Figure 3: best γ", COSTS, "c", best_gamma_curve, Scale(0.0, MOST_GAMMA), rows, "gamma"),
        _chart("Figure 4: speedup at c = 0", GAMMAS, "γ", speedup_curve, times, rows, "speedup_decoding"),
        _chart("Figure 4: operations at c = 0", GAMMAS, "γ", operations_curve, times, rows, "operations_measured"),
    ]


def _chart(
    title: str,
    values: tuple[float, ...],
    name: str,
    curve: Callable[[Any], list[Any]],
    y_scale: Scale,
    rows: list[dict[str, Any]],
    key: str,
) -> LineChart:
    series: dict[str, list[Point]] = {}
    for value in values:
        points = list(zip(ALPHAS, curve(value), strict=True))
        # No further than the picture goes: a line along its edge would say what is not so.
        series[f"{name}={value:g}"] = [point for point in points if y_scale.low <= point[1] <= y_scale.high]
    dots = {
        f"{row['method']} at T = {row['temperature']:g}": (row["alpha"], row[key])
        for row in rows
        if row[key] is not None
    }
    return line_chart(title, "α", series, Scale(0.0, 1.0), y_scale, dots)
