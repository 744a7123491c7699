"""Where figures lie in a picture: scales with round ticks, and lines as SVG has them.

Bars and intervals are placed in percent of a width, so that text keeps its size on a phone; charts of lines have a
view box of `WIDTH` x `HEIGHT`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 340, 220
LEFT, RIGHT, TOP, BOTTOM = 36, 46, 10, 34  # margins, for ticks and for the lines' names
LABEL_HEIGHT = 12  # of a line's name
MOST_POINTS = 200  # of a line: more are not seen
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)

Point = tuple[float, float]


@dataclass(frozen=True)
class Tick:
    """text: the value as it is written; at: its place."""

    text: str
    at: float


@dataclass(frozen=True)
class Scale:
    """From `low` to `high`; what lies outside is drawn at the end."""

    low: float
    high: float

    def percent(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)

    def ticks(self, about: int = 5) -> list[Tick]:
        """At round values, placed in percent."""
        return [Tick(_text(value), self.percent(value)) for value in round_values(self.low, self.high, about)]


def scale_around(values: Sequence[float], *also: float) -> Scale:
    """With a little room on both sides."""
    every = [*values, *also]
    low, high = min(every), max(every)
    room = 0.06 * (high - low) or 0.5
    return Scale(low - room, high + room)


def round_values(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten, from low to high."""
    if not low < high:
        return [low]
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in STEPS if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Line:
    """points: as SVG's polyline has them; label_y: where its name stands, in the margin behind its end."""

    name: str
    points: str
    label_y: float


@dataclass(frozen=True)
class Dot:
    name: str
    x: float
    y: float


@dataclass(frozen=True)
class LineChart:
    """title says all of it in words, for those who do not see it."""

    title: str
    x_name: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[Line]
    dots: list[Dot] = field(default_factory=list)


def line_chart(
    title: str,
    x_name: str,
    series: dict[str, list[Point]],
    x_scale: Scale,
    y_scale: Scale,
    dots: dict[str, Point] | None = None,
) -> LineChart:
    """Lines with their names at the right, none on top of another."""

    def placed(point: Point) -> Point:
        return _x(x_scale, point[0]), _y(y_scale, point[1])

    shown = {name: [placed(point) for point in _thinned(points)] for name, points in series.items() if points}
    label_ys = _spread([points[-1][1] for points in shown.values()])
    lines = [
        Line(name, " ".join(f"{x:g},{y:g}" for x, y in points), label_y)
        for (name, points), label_y in zip(shown.items(), label_ys, strict=True)
    ]
    return LineChart(
        title,
        x_name,
        [Tick(_text(value), _x(x_scale, value)) for value in round_values(x_scale.low, x_scale.high, 4)],
        [Tick(_text(value), _y(y_scale, value)) for value in round_values(y_scale.low, y_scale.high, 4)],
        lines,
        [Dot(name, *placed(point)) for name, point in (dots or {}).items()],
    )


def _x(scale: Scale, value: float) -> float:
    return round(LEFT + scale.percent(value) / 100 * (WIDTH - LEFT - RIGHT), 1)


def _y(scale: Scale, value: float) -> float:
    return round(HEIGHT - BOTTOM - scale.percent(value) / 100 * (HEIGHT - TOP - BOTTOM), 1)


def _thinned(points: list[Point]) -> list[Point]:
    """Every n-th, and the last."""
    step = math.ceil(len(points) / MOST_POINTS)
    return points if step <= 1 else [*points[:-1:step], points[-1]]


def _spread(heights: list[float]) -> list[float]:
    """The same, moved down where they are closer than a line of text, and up again where they left the picture."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    moved = list(heights)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + LABEL_HEIGHT)
    lowest = float(HEIGHT - BOTTOM + 4)
    for i in reversed(order):
        moved[i], lowest = min(moved[i], lowest), min(moved[i], lowest) - LABEL_HEIGHT
    return [round(height, 1) for height in moved]


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
