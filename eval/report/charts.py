"""The report's pictures: bar charts of the summary, and Leviathan's figures 2, 3 and 4 with measured points.

The curves of the figures (arXiv 2211.17192) are those of `eval/bench/theory.py`.

2   expected tokens of a round as a function of alpha, for various gamma; points: measured tau
3   the best gamma as a function of alpha, for various c; points: the gamma that was used
4   walltime improvement and operations as a function of alpha, for various gamma, with drafting at no cost (c = 0);
    points: measured speedup of decoding and counted operations

Points have their own c and gamma; their distance below a curve of figure 4 is the cost of drafting and verifying.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.eval.bench.theory import best_gamma, expected_tokens, operations_factor, walltime_factor
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.summary import MEAN_OF_TASKS, OVERALL, drafted_rows, shown_categories
from draftsmith.eval.report.text import NOT_LOSSLESS

# Palette of Okabe and Ito, which colour-blind readers can distinguish too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")

MOST_INCHES = 60.0  # 8,400 pixels; matplotlib draws 65,536 at most
LONGEST_NAME = 40  # characters

GAMMAS = (1, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ALPHAS = tuple(step / 100 for step in range(100))
LONGEST_GAMMA = 100
MARKERS = "osD^vP*X<>"
SHADES = ("#222222", "#999999", "#8B0000")  # of the first ten methods, the next, ...


def draw_charts(summary: list[dict[str, Any]], folder: Path, title: str) -> list[Path]:
    """Write `speedup.png` and `tau.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    speedup = f"{title}: speedup (mean over runs, bars: standard deviation)", "speedup over the autoregressive loop"
    tau = f"{title}: acceptance length tau", "tau: tokens per round, bonus token included"
    return [
        _bars(summary, "speedup_mean", "speedup_std", *speedup, folder / "speedup.png"),
        _bars(summary, "tau", None, *tau, folder / "tau.png"),
    ]


@matplotlib.rc_context({"text.parse_math": False})  # a category may hold dollar signs
def _bars(
    summary: list[dict[str, Any]], value_key: str, spread_key: str | None, title: str, label: str, file: Path
) -> Path:
    """Draw a metric's bars by task and method, with error bars if `spread_key` is given, and return the file."""
    rows = {(series_name(row, summary), row["category"]): row for row in summary if row["method"] != AUTOREGRESSIVE}
    series = list(dict.fromkeys(name for name, _ in rows))
    categories = [*shown_categories(summary), OVERALL]
    over_tasks = {
        (series_name(row, summary), MEAN_OF_TASKS): row["over_tasks"]
        for row in drafted_rows(summary)
        if row.get("over_tasks")
    }
    if over_tasks:
        rows, categories = rows | over_tasks, [*categories, MEAN_OF_TASKS]
    width_inches = 1.1 * len(categories) * max(1, len(series)) ** 0.5 + 2
    figure, axes = plt.subplots(figsize=(min(max(7.0, width_inches), MOST_INCHES), 4.6))
    width = 0.8 / max(1, len(series))
    for number, name in enumerate(series):
        places = [index - 0.4 + width * (number + 0.5) for index in range(len(categories))]
        heights = [rows[name, category][value_key] or 0.0 for category in categories]
        spreads = [rows[name, category].get(spread_key) or 0.0 for category in categories] if spread_key else None
        bars = axes.bar(
            places,
            heights,
            width * 0.94,
            yerr=spreads,
            capsize=3,
            color=COLOURS[number % len(COLOURS)],
            hatch="//" if number >= len(COLOURS) else None,
            label=name,
        )
        if len(series) * len(categories) <= 40:
            axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.axhline(1.0, color="#444444", linewidth=1, linestyle="--", label="autoregressive")
    names = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in categories]
    axes.set_xticks(range(len(categories)), names, rotation=20 if len(categories) > 5 else 0)
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.02, y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, axes, min(5, len(series) + 1), file)


def save_figure(figure: Figure, axes: Axes, columns: int, file: Path) -> Path:
    """Save the figure with the legend of `axes` below it, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    figure.set_layout_engine("constrained")
    figure.savefig(file, dpi=140)
    plt.close(figure)
    return file


def series_name(row: dict[str, Any], summary: list[dict[str, Any]]) -> str:
    """Return the method's name in a chart, with its temperature if there are several, and a mark if not lossless."""
    several = len({other["temperature"] for other in summary}) > 1
    name = f"{row['method']} T={row['temperature']:g}" if several else row["method"]
    return name if row["lossless"] else f"{name} ({NOT_LOSSLESS})"


@dataclass(frozen=True)
class TheoryPanel:
    """One of Leviathan's figures: a curve over alpha for each value of a parameter, and measured points.

    file: name of the picture. heading: title of the same chart in report.html. parameter: `gamma` or `c`. curve:
    function of alpha and the parameter. key: key of the timing row that gives a point's height.
    """

    file: str
    title: str
    heading: str
    label: str
    parameter: str
    values: tuple[Any, ...]
    curve: Callable[[float, Any], float]
    key: str

    def over_alphas(self, value: Any) -> list[float]:
        """Return the curve of one value, at `ALPHAS`."""
        return [self.curve(alpha, value) for alpha in ALPHAS]


THEORY = (
    TheoryPanel(
        "theory_tokens",
        "figure 2: expected tokens (points: measured)",
        "Figure 2: expected tokens per round",
        "tokens per round, the target's own included",
        "gamma",
        GAMMAS,
        expected_tokens,
        "tau",
    ),
    TheoryPanel(
        "theory_gamma",
        "figure 3: best gamma (points: the one used)",
        "Figure 3: best γ",
        "gamma",
        "c",
        COSTS,
        lambda alpha, c: best_gamma(alpha, c, at_most=LONGEST_GAMMA),
        "gamma",
    ),
    TheoryPanel(
        "theory_speedup",
        "figure 4: walltime improvement at c = 0 (points: measured)",
        "Figure 4: speedup at c = 0",
        "speedup",
        "gamma",
        GAMMAS,
        lambda alpha, gamma: walltime_factor(alpha, gamma, 0.0),
        "speedup_decoding",
    ),
    TheoryPanel(
        "theory_speedup",
        "operations at c = 0 (points: counted)",
        "Figure 4: operations at c = 0",
        "operations over the target's own",
        "gamma",
        GAMMAS,
        lambda alpha, gamma: operations_factor(alpha, gamma, 0.0),
        "operations_measured",
    ),
)


@matplotlib.rc_context({"text.parse_math": False})  # a method's name may hold dollar signs
def draw_theory(timing: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write `theory_tokens.png`, `theory_gamma.png` and `theory_speedup.png`.

    Args:
        timing: Rows of `summarize_timing`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in timing if row["method"] != AUTOREGRESSIVE]
    files = []
    for name in dict.fromkeys(panel.file for panel in THEORY):
        panels = [panel for panel in THEORY if panel.file == name]
        width = 6.4 if len(panels) == 1 else 11.0
        figure, (every,) = plt.subplots(1, len(panels), figsize=(width, 4.6), squeeze=False)
        for axes, panel in zip(every, panels, strict=True):
            _draw_panel(axes, panel, rows)
        files.append(save_figure(figure, every[0], 5, folder / f"{name}.png"))
    return files


def _draw_panel(axes: Axes, panel: TheoryPanel, rows: list[dict[str, Any]]) -> None:
    """Draw the curves, and one marker per method whose figure was measured."""
    for colour, value in zip(COLOURS, panel.values, strict=False):
        name = f"{panel.parameter} = {value:g}"
        axes.plot(ALPHAS, panel.over_alphas(value), color=colour, linewidth=1.2, label=name)
    for number, row in enumerate(rows):
        if row[panel.key] is not None:
            marker, shade = MARKERS[number % len(MARKERS)], SHADES[number // len(MARKERS) % len(SHADES)]
            point = ([row["alpha"]], [row[panel.key]])
            axes.plot(*point, marker, color=shade, markersize=7, label=series_name(row, rows), zorder=3)
    if panel.key == "gamma":
        axes.set_ylim(0, 30)
    if panel.key == "operations_measured":
        axes.set_ylim(0, 1.1 * max([7.0, *(row[panel.key] or 0.0 for row in rows)]))
    axes.set_xlim(0, 1)
    axes.set_xlabel("alpha")
    axes.set_ylabel(panel.label)
    axes.set_title(panel.title, fontsize=10)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
