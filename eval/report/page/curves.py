"""Line charts for report.html: scales with round ticks, SVG lines, Leviathan's figures, and training curves.

Bars and intervals are placed in percent of the width, so that text keeps its size on a phone; line charts have a view
box of `WIDTH` x `HEIGHT`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.bench.theory import best_gamma, expected_tokens, walltime_factor
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.summary import Row
from draftsmith.models.base.registry import Training
from draftsmith.train.drafter.shown import by_depth

WIDTH, HEIGHT = 340, 220
LEFT, RIGHT, TOP, BOTTOM = 36, 46, 10, 34  # margins, for ticks and for the lines' names
LABEL_HEIGHT = 12  # of a line's name
MOST_POINTS = 200  # of a line; more cannot be distinguished
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
ALPHAS = tuple(step / 100 for step in range(100))
GAMMAS = (1, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
LONGEST_GAMMA = 100
MOST_GAMMA = 30.0  # of the chart of best gammas
MOST_TIMES = 8.0  # of the other charts of theory

Point = tuple[float, float]
Tick = tuple[str, float]  # label, place
History = list[dict[str, float]]


@dataclass(frozen=True)
class Scale:
    """A scale from `low` to `high`; values outside are drawn at its ends."""

    low: float
    high: float

    def percent(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)

    def ticks(self, about: int = 5) -> list[Tick]:
        """Return about this many ticks at round values, placed in percent."""
        values = round_values(self.low, self.high, about)
        return [(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}", self.percent(value)) for value in values]


def scale_around(values: Sequence[float], *also: float) -> Scale:
    """Return a scale over the values, with a margin on both sides."""
    every = [*values, *also]
    low, high = min(every), max(every)
    room = 0.06 * (high - low) or 0.5
    return Scale(low - room, high + room)


def round_values(low: float, high: float, about: int) -> list[float]:
    """Choose multiples of 1, 2, 2.5 or 5 times a power of ten, from low to high."""
    if not low < high:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in STEPS if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    title: str,
    x_name: str,
    series: dict[str, list[Point]],
    x_scale: Scale,
    y_scale: Scale,
    dots: dict[str, Point] | None = None,
) -> dict[str, Any]:
    """Build a chart: scale the points, and place the lines' names at the right without overlap.

    Returns:
        What the template draws: `lines` are (name, points of an SVG polyline, y of the name in the margin at the
        right), `dots` (name, x, y), ticks (label, place). The title is also for screen readers.
    """

    def x_at(percent: float) -> float:
        return round(LEFT + percent / 100 * (WIDTH - LEFT - RIGHT), 1)

    def y_at(percent: float) -> float:
        return round(HEIGHT - BOTTOM - percent / 100 * (HEIGHT - TOP - BOTTOM), 1)

    def placed(point: Point) -> Point:
        return x_at(x_scale.percent(point[0])), y_at(y_scale.percent(point[1]))

    shown = {}
    for name, points in series.items():
        step = math.ceil(len(points) / MOST_POINTS)
        if points:
            thinned = points if step <= 1 else [*points[:-1:step], points[-1]]
            shown[name] = [placed(point) for point in thinned]
    label_ys = _spread([points[-1][1] for points in shown.values()])
    return {
        "title": title,
        "x_name": x_name,
        "x_ticks": [(text, x_at(percent)) for text, percent in x_scale.ticks(4)],
        "y_ticks": [(text, y_at(percent)) for text, percent in y_scale.ticks(4)],
        "lines": [
            (name, " ".join(f"{x:g},{y:g}" for x, y in points), label_y)
            for (name, points), label_y in zip(shown.items(), label_ys, strict=True)
        ],
        "dots": [(name, *placed(point)) for name, point in (dots or {}).items()],
    }


def _spread(heights: list[float]) -> list[float]:
    """Move labels apart to the height of a line of text: down, and up again at the picture's lower end."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    moved = list(heights)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + LABEL_HEIGHT)
    lowest = float(HEIGHT - BOTTOM + 4)
    for i in reversed(order):
        moved[i], lowest = min(moved[i], lowest), min(moved[i], lowest) - LABEL_HEIGHT
    return [round(height, 1) for height in moved]


# Title, parameter, its values, the curve as a function of alpha and the parameter, the timing row's key of a point.
THEORY: tuple[tuple[str, str, Sequence[Any], Callable[[float, Any], float], str], ...] = (
    ("Figure 2: expected tokens per round", "γ", GAMMAS, expected_tokens, "tau"),
    ("Figure 3: best γ", "c", COSTS, lambda alpha, c: best_gamma(alpha, c, at_most=LONGEST_GAMMA), "gamma"),
    ("Figure 4: speedup at c = 0", "γ", GAMMAS, lambda a, gamma: walltime_factor(a, gamma, 0.0), "speedup_decoding"),
)


def theory_charts(timing: list[Row]) -> list[dict[str, Any]]:
    """Build Leviathan's figures 2, 3 and the speedups of 4 (arXiv 2211.17192), with measured values as dots.

    Dots have their own c and gamma; their distance below a curve of figure 4 is the cost of drafting and verifying.
    """
    rows = [row for row in timing if row["method"] != AUTOREGRESSIVE]
    charts = []
    for title, parameter, values, curve, key in THEORY:
        y_scale = Scale(0.0, MOST_GAMMA) if key == "gamma" else Scale(1.0, MOST_TIMES)
        series: dict[str, list[Point]] = {}
        for value in values:
            points = ((alpha, curve(alpha, value)) for alpha in ALPHAS)
            # Points outside are left out: a line along the picture's edge would be wrong.
            series[f"{parameter}={value:g}"] = [point for point in points if y_scale.low <= point[1] <= y_scale.high]
        dots = {
            f"{row['method']} at T = {row['temperature']:g}": (row["alpha"], row[key])
            for row in rows
            if row[key] is not None
        }
        charts.append(line_chart(title, "α", series, Scale(0.0, 1.0), y_scale, dots))
    return charts


# ---- training ----


def training_curves(trained: dict[str, Training]) -> list[tuple[str, Training, list[dict[str, Any]]]]:
    """Return name, log and training curves of every drafter that has a log."""
    return [(name, log, _charts(log.history)) for name, log in trained.items() if log.history]


def curves_by_depth(history: History, name: str) -> dict[str, list[Point]]:
    """Collect (step, value) of each depth: `accuracy` of `accuracy_depth1`, `accuracy_depth2`, ..."""
    curves: dict[int, list[Point]] = {}
    for entry in history:
        for depth, value in by_depth(entry, f"{name}_depth") if "step" in entry else ():
            curves.setdefault(depth, []).append((entry["step"], value))
    return {str(depth): curves[depth] for depth in sorted(curves)}


def _charts(history: History) -> list[dict[str, Any]]:
    """Build the charts with at least one line of two or more points."""
    candidates = [
        ("Accuracy by depth, training examples", curves_by_depth(history, "accuracy"), Scale(0.0, 1.0)),
        ("Loss by depth, training examples", curves_by_depth(history, "loss"), None),
        ("Accuracy by depth, held-out examples", curves_by_depth(history, "eval_accuracy"), Scale(0.0, 1.0)),
        ("Simulated tau by chain length, held-out examples", curves_by_depth(history, "eval_tau"), None),
    ]
    charts = []
    for title, series, y_scale in candidates:
        series = {each: points for each, points in series.items() if len(points) > 1}
        if not series:
            continue
        steps = [point[0] for points in series.values() for point in points]
        values = [point[1] for points in series.values() for point in points]
        charts.append(
            line_chart(title, "step", series, Scale(min(0.0, *steps), max(steps)), y_scale or scale_around(values))
        )
    return charts
