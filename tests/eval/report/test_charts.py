"""Charts: curves against the paper's table 1 or by hand, our measured points, and unusual names."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from support.report_facts import TIMING, row

from draftsmith.eval.report import charts
from draftsmith.eval.report.charts import ALPHAS, THEORY, draw_charts, draw_theory

ROWS: list[dict[str, Any]] = [
    {"method": "autoregressive", "temperature": 0.0, "lossless": True, "alpha": 0.0},
    {
        "method": "chain", "temperature": 0.0, "lossless": True, "alpha": 0.7, "tau": 2.5, "gamma": 4,
        "speedup_decoding": 1.9, "operations_measured": 1.7,
    },
    {
        "method": "tree", "temperature": 0.0, "lossless": True, "alpha": 0.8, "tau": 2.9, "gamma": 5,
        "speedup_decoding": 2.1, "operations_measured": None,
    },
]  # fmt: skip


def test_curves_by_hand_and_from_table_1() -> None:
    """Figure 2 is 1 + a + ... + a^gamma.

    At alpha .5, c .1 the speedups are 1, 1.364, 1.458, 1.442 for gamma 0 to 3; nothing pays if alpha <= c. Table 1 has
    for (alpha .8, gamma 5) 3.69x and operations 1.63; at alpha 0 all gamma + 1 operations are wasted.
    """
    tokens, gammas, speedups, operations = THEORY

    def at(panel: charts.TheoryPanel, value: float, alpha: float) -> float:
        return panel.over_alphas(value)[ALPHAS.index(alpha)]

    assert at(tokens, 3, 0.5) == pytest.approx(1.875)
    assert at(tokens, 7, 0.9) == pytest.approx((1 - 0.9**8) / 0.1)
    assert [at(gammas, 0.1, alpha) for alpha in (0.05, 0.1, 0.5)] == [0, 0, 2]
    assert gammas.over_alphas(0.1) == sorted(gammas.over_alphas(0.1))
    assert at(speedups, 5, 0.8) == pytest.approx(3.69, abs=0.005)
    assert at(operations, 5, 0.8) == pytest.approx(1.63, abs=0.005)
    assert (at(speedups, 3, 0.0), at(operations, 3, 0.0)) == (1, 4)


def test_measured_points_are_on_the_curves_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(charts.plt, "close", figures.append)
    files = draw_theory(ROWS, tmp_path)
    assert [file.name for file in files] == ["theory_tokens.png", "theory_gamma.png", "theory_speedup.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000 for file in files)
    monkeypatch.undo()

    def drawn(figure: int, panel: int) -> tuple[list[Any], dict[str, tuple[float, float]]]:
        lines = figures[figure].axes[panel].get_lines()
        curves = [list(line.get_ydata()) for line in lines if len(line.get_xdata()) > 1]
        points = {line.get_label(): line for line in lines if len(line.get_xdata()) == 1}
        return curves, {name: (line.get_xdata()[0], line.get_ydata()[0]) for name, line in points.items()}

    found = [drawn(0, 0), drawn(1, 0), drawn(2, 0), drawn(2, 1)]
    assert [curves for curves, _ in found] == [[panel.over_alphas(each) for each in panel.values] for panel in THEORY]
    assert [points for _, points in found] == [
        {"chain": (0.7, 2.5), "tree": (0.8, 2.9)},
        {"chain": (0.7, 4), "tree": (0.8, 5)},
        {"chain": (0.7, 1.9), "tree": (0.8, 2.1)},
        {"chain": (0.7, 1.7)},
    ]
    for figure in figures:
        plt.close(figure)


@pytest.mark.filterwarnings("ignore:Glyph")
def test_category_names_are_not_parsed_as_markup(tmp_path: Path) -> None:
    """Dollar signs are not parsed as mathematics, and charts are at most 60 inches at 140 dpi."""
    categories = ["$\\frac{$", "x" * 5000, "\u4f60\u597d", *(f"category {n}" for n in range(60))]
    rows = [row(name, category) for name in ("autoregressive", "a$_{$") for category in (*categories, "overall")]
    for picture in draw_charts(rows, tmp_path, "run $\\x$"):
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert int.from_bytes(picture.read_bytes()[16:20]) == 60 * 140
    assert [file.exists() for file in draw_theory([{**TIMING[0], "method": "a$_{$"}], tmp_path)] == [True] * 3
