"""Predicted beside measured: places on one scale, and Leviathan's curves no further than the picture."""

import pytest
from support.report_facts import TIMING

from draftsmith.eval.report.page import plot
from draftsmith.eval.report.page.predicted import MOST_TIMES, predictions, theory_charts


def test_places() -> None:
    """From 1 to 1.92 with 6 % of that on both sides."""
    found = predictions([TIMING[0] | {"method": "autoregressive"}, *TIMING])
    assert found is not None
    (row,) = found.rows
    room = 0.06 * 0.92
    for place, value in ((row.by_clock, 1.9), (row.by_theory, 1.92), (row.measured, 1.8), (found.one, 1.0)):
        assert place == pytest.approx(100 * (value - 1 + room) / (0.92 + 2 * room), abs=0.01)
    assert predictions([]) is None


def test_the_fastest_first() -> None:
    rows = [TIMING[0] | {"method": str(n), "speedup_decoding": 1.0 + n} for n in range(3)]
    found = predictions(rows)
    assert found is not None
    assert [each.row["method"] for each in found.rows] == ["2", "1", "0"]


def test_curves() -> None:
    """gamma = 1 at alpha = 0.99 expects 1.99 tokens; dots carry the method's name where there is a figure."""
    charts = theory_charts([*TIMING, TIMING[0] | {"method": "x", "operations_measured": None}])
    assert [len(chart.lines) for chart in charts] == [5, 6, 5, 5]
    gamma_1 = charts[0].lines[0]
    assert gamma_1.name == "γ=1"
    height = plot.HEIGHT - plot.BOTTOM - plot.TOP
    expected = plot.HEIGHT - plot.BOTTOM - height * (1.99 - 1) / (MOST_TIMES - 1)
    assert float(gamma_1.points.split(",")[-1]) == pytest.approx(expected, abs=0.1)
    assert [dot.name for dot in charts[0].dots] == ["tree at T = 0", "x at T = 0"]
    assert [dot.name for dot in charts[3].dots] == ["tree at T = 0"]
    # At alpha 0.71 and tau 2.5.
    left, right = plot.LEFT, plot.WIDTH - plot.RIGHT
    assert charts[0].dots[0].x == pytest.approx(left + 0.71 * (right - left), abs=0.1)
