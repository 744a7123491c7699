"""Line charts for report.html: scales with round ticks, SVG lines, and training curves.

Bars and intervals are placed in percent of the width, so that text keeps its size on a phone; line charts have a view
box of `WIDTH` x `HEIGHT`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.models.base.registry import Training
from draftsmith.train.drafter.shown import by_depth

WIDTH, HEIGHT = 340, 220
LEFT, RIGHT, TOP, BOTTOM = 36, 46, 10, 34  # margins, for ticks and for the lines' names
LABEL_HEIGHT = 12  # of a line's name
MOST_POINTS = 200  # of a line; more cannot be distinguished
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)

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
    title: str, x_name: str, series: dict[str, list[Point]], x_scale: Scale, y_scale: Scale
) -> dict[str, Any]:
    """Build a chart: scale the points, and place the lines' names at the right without overlap.

    Returns:
        What the template draws: `lines` are (name, points of an SVG polyline, y of the name in the margin at the
        right), ticks (label, place). The title is also for screen readers.
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
