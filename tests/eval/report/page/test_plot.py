"""Scales, round ticks, and names of lines that do not cover each other."""

from itertools import pairwise

import pytest

from draftsmith.eval.report.page import plot
from draftsmith.eval.report.page.plot import Scale, line_chart, round_values, scale_around


@pytest.mark.parametrize(
    ("low", "high", "about", "values"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0.91, 2.68, 4, [1.0, 1.5, 2.0, 2.5]),
        (0, 1932, 4, [0, 500, 1000, 1500]),
        (-0.12, 2.12, 5, [0, 0.5, 1.0, 1.5, 2.0]),
        (3, 3, 5, [3]),
    ],
)
def test_round_values(low: float, high: float, about: int, values: list[float]) -> None:
    assert round_values(low, high, about) == pytest.approx(values)


def test_percent_is_clamped() -> None:
    scale = Scale(1.0, 3.0)
    assert [scale.percent(value) for value in (0.0, 1.0, 2.0, 3.0, 9.0)] == [0, 0, 50, 100, 100]
    assert [(tick.text, tick.at) for tick in scale.ticks(4)] == [
        ("1", 0), ("1.5", 25), ("2", 50), ("2.5", 75), ("3", 100),
    ]  # fmt: skip
    around = scale_around([2.0], 2.0)
    assert (around.low, around.high) == (1.5, 2.5)


def test_lines_are_named_apart() -> None:
    """Five that end at the same height, at the bottom of the picture: a line of text each, none below it."""
    series = {str(n): [(0.0, 1.0), (10.0, 0.0)] for n in range(5)}
    chart = line_chart("t", "step", series, Scale(0, 10), Scale(0, 1))
    heights = sorted(line.label_y for line in chart.lines)
    assert all(b - a >= plot.LABEL_HEIGHT for a, b in pairwise(heights))
    assert heights[-1] <= plot.HEIGHT - plot.BOTTOM + plot.LABEL_HEIGHT
    assert (
        chart.lines[0].points == f"{plot.LEFT:g},{plot.TOP:g} {plot.WIDTH - plot.RIGHT:g},{plot.HEIGHT - plot.BOTTOM:g}"
    )


def test_long_lines_keep_their_ends() -> None:
    points = [(float(n), float(n % 7)) for n in range(1001)]
    (line,) = line_chart("t", "step", {"a": points}, Scale(0, 1000), Scale(0, 7)).lines
    places = line.points.split(" ")
    assert len(places) <= plot.MOST_POINTS + 1
    assert places[0].startswith(f"{plot.LEFT:g},")
    assert places[-1].startswith(f"{plot.WIDTH - plot.RIGHT:g},")
