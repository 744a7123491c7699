"""Leviathan's figures 2, 3 and 4 (arXiv 2211.17192), drawn from `theory.py`, with what was measured here as points.

2   expected tokens of a round as a function of alpha, for various gamma; points: measured tau
3   the best gamma as a function of alpha, for various c; points: the gamma that was used
4   walltime improvement and operations as a function of alpha, for various gamma, with drafting at no cost (c = 0);
    points: measured speedup of decoding and counted operations

Points carry their own c and gamma; how far they lie below a curve of figure 4 is what drafting and verifying cost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from draftsmith.eval.bench.theory import best_gamma, expected_tokens, operations_factor, walltime_factor
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.charts import COLOURS, save_figure, series_name

GAMMAS = (1, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ALPHAS = tuple(step / 100 for step in range(100))
LONGEST_GAMMA = 100
MARKERS = "osD^vP*X<>"
SHADES = ("#222222", "#999999", "#8B0000")  # of the first ten methods, the next, ...


@matplotlib.rc_context({"text.parse_math": False})  # a method's name may hold dollar signs
def draw_theory(timing: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write `theory_tokens.png`, `theory_gamma.png` and `theory_speedup.png`.

    Args:
        timing: Rows of `summarize_timing`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    points = [row for row in timing if row["method"] != AUTOREGRESSIVE]
    files = []
    for name, draw, width in (
        ("theory_tokens", _tokens, 6.4),
        ("theory_gamma", _gamma, 6.4),
        ("theory_speedup", _speedup, 11.0),
    ):
        panels = 2 if name == "theory_speedup" else 1
        figure, axes = plt.subplots(1, panels, figsize=(width, 4.6), squeeze=False)
        draw(list(axes[0]), points)
        files.append(save_figure(figure, axes[0][0], 5, folder / f"{name}.png"))
    return files


def tokens_curve(gamma: int) -> list[float]:
    """Figure 2, over `ALPHAS`."""
    return [expected_tokens(alpha, gamma) for alpha in ALPHAS]


def best_gamma_curve(c: float) -> list[int]:
    """Figure 3, over `ALPHAS`."""
    return [best_gamma(alpha, c, at_most=LONGEST_GAMMA) for alpha in ALPHAS]


def speedup_curve(gamma: int) -> list[float]:
    """Figure 4, over `ALPHAS`: theorem 3.8 at c = 0."""
    return [walltime_factor(alpha, gamma, 0.0) for alpha in ALPHAS]


def operations_curve(gamma: int) -> list[float]:
    """Figure 4, over `ALPHAS`: theorem 3.11 at c-hat = 0."""
    return [operations_factor(alpha, gamma, 0.0) for alpha in ALPHAS]


def _tokens(axes: list[Axes], points: list[dict[str, Any]]) -> None:
    _curves(axes[0], GAMMAS, "gamma", tokens_curve)
    _points(axes[0], points, "tau")
    _label(axes[0], "tokens per round, the target's own included", "figure 2: expected tokens (points: measured)")


def _gamma(axes: list[Axes], points: list[dict[str, Any]]) -> None:
    _curves(axes[0], COSTS, "c", best_gamma_curve)
    _points(axes[0], points, "gamma")
    axes[0].set_ylim(0, 30)
    _label(axes[0], "gamma", "figure 3: best gamma (points: the one used)")


def _speedup(axes: list[Axes], points: list[dict[str, Any]]) -> None:
    _curves(axes[0], GAMMAS, "gamma", speedup_curve)
    _points(axes[0], points, "speedup_decoding")
    _label(axes[0], "speedup", "figure 4: walltime improvement at c = 0 (points: measured)")
    _curves(axes[1], GAMMAS, "gamma", operations_curve)
    _points(axes[1], points, "operations_measured")
    axes[1].set_ylim(0, 1.1 * max([7.0, *(row["operations_measured"] or 0.0 for row in points)]))
    _label(axes[1], "operations over the target's own", "operations at c = 0 (points: counted)")


def _curves(axes: Axes, values: tuple[Any, ...], name: str, curve: Callable[[Any], list[Any]]) -> None:
    for number, value in enumerate(values):
        axes.plot(ALPHAS, curve(value), color=COLOURS[number], linewidth=1.2, label=f"{name} = {value:g}")


def _points(axes: Axes, rows: list[dict[str, Any]], key: str) -> None:
    """A marker a method; nothing where the figure was not measured."""
    for number, row in enumerate(rows):
        if row[key] is not None:
            marker = MARKERS[number % len(MARKERS)]
            name = series_name(row, rows)
            shade = SHADES[number // len(MARKERS) % len(SHADES)]
            axes.plot([row["alpha"]], [row[key]], marker, color=shade, markersize=7, label=name, zorder=3)


def _label(axes: Axes, label: str, title: str) -> None:
    axes.set_xlim(0, 1)
    axes.set_xlabel("alpha")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
