"""Leviathan's figures 2 to 4: the curves at points known from the paper's table 1 or by hand, and ours drawn in."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from draftsmith.eval.report import theory_charts
from draftsmith.eval.report.theory_charts import (
    ALPHAS,
    COSTS,
    GAMMAS,
    best_gamma_curve,
    draw_theory,
    operations_curve,
    speedup_curve,
    tokens_curve,
)

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


def at(alpha: float, curve: list[Any]) -> Any:
    return curve[ALPHAS.index(alpha)]


def test_figure_2_by_hand() -> None:
    """1 + a + ... + a^gamma."""
    assert at(0.5, tokens_curve(3)) == pytest.approx(1.875)
    assert at(0.8, tokens_curve(1)) == pytest.approx(1.8)
    assert at(0.0, tokens_curve(10)) == 1
    assert at(0.9, tokens_curve(7)) == pytest.approx((1 - 0.9**8) / 0.1)


def test_figure_3_by_hand() -> None:
    """At alpha .5, c .1 the speedups are 1, 1.364, 1.458, 1.442 for gamma 0 to 3; nothing pays if alpha <= c."""
    curve = best_gamma_curve(0.1)
    assert at(0.5, curve) == 2
    assert at(0.1, curve) == at(0.05, curve) == 0
    assert curve == sorted(curve)
    assert all(more <= less for less, more in zip(best_gamma_curve(0.05), curve, strict=True))


def test_figure_4_holds_table_1_of_the_paper() -> None:
    """(alpha .8, gamma 5): 3.69x, operations 1.63; (.9, 10): 6.86x, 1.60. At alpha 0 all gamma + 1 are in vain."""
    assert at(0.8, speedup_curve(5)) == pytest.approx(3.69, abs=0.005)
    assert at(0.8, operations_curve(5)) == pytest.approx(1.63, abs=0.005)
    assert at(0.9, speedup_curve(10)) == pytest.approx(6.86, abs=0.005)
    assert at(0.9, operations_curve(10)) == pytest.approx(1.60, abs=0.005)
    assert (at(0.0, speedup_curve(3)), at(0.0, operations_curve(3))) == (1, 4)


def test_measured_points_are_drawn_into_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(theory_charts.plt, "close", figures.append)
    files = draw_theory(ROWS, tmp_path)
    assert [file.name for file in files] == ["theory_tokens.png", "theory_gamma.png", "theory_speedup.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000 for file in files)
    monkeypatch.undo()

    def drawn(figure: int, panel: int) -> tuple[list[Any], dict[str, tuple[float, float]]]:
        lines = figures[figure].axes[panel].get_lines()
        curves = [list(line.get_ydata()) for line in lines if len(line.get_xdata()) > 1]
        points = {line.get_label(): line for line in lines if len(line.get_xdata()) == 1}
        return curves, {name: (line.get_xdata()[0], line.get_ydata()[0]) for name, line in points.items()}

    assert drawn(0, 0) == ([tokens_curve(g) for g in GAMMAS], {"chain": (0.7, 2.5), "tree": (0.8, 2.9)})
    assert drawn(1, 0) == ([best_gamma_curve(c) for c in COSTS], {"chain": (0.7, 4), "tree": (0.8, 5)})
    assert drawn(2, 0) == ([speedup_curve(g) for g in GAMMAS], {"chain": (0.7, 1.9), "tree": (0.8, 2.1)})
    assert drawn(2, 1) == ([operations_curve(g) for g in GAMMAS], {"chain": (0.7, 1.7)})
    for figure in figures:
        plt.close(figure)
