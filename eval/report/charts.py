"""Bar charts of the summary: one group of bars a category, one colour a method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.categories import shown_categories
from draftsmith.eval.report.summary import OVERALL
from draftsmith.eval.report.text import NOT_LOSSLESS

# Okabe and Ito: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")

MOST_INCHES = 60.0  # 8,400 pixels; matplotlib draws 65,536 at most
LONGEST_NAME = 40  # characters


def draw_charts(summary: list[dict[str, Any]], folder: Path, title: str) -> list[Path]:
    """Write `speedup.png` and `tau.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _bars(
            summary,
            ("speedup_mean", "speedup_std"),
            "speedup over the autoregressive loop",
            f"{title}: speedup (mean over runs, bars: standard deviation)",
            folder / "speedup.png",
        ),
        _bars(
            summary,
            ("tau", None),
            "tau: tokens per round, bonus token included",
            f"{title}: acceptance length tau",
            folder / "tau.png",
        ),
    ]


@matplotlib.rc_context({"text.parse_math": False})  # a category may hold dollar signs
def _bars(summary: list[dict[str, Any]], keys: tuple[str, str | None], label: str, title: str, file: Path) -> Path:
    value_key, spread_key = keys
    rows = {(series_name(row, summary), row["category"]): row for row in summary if row["method"] != AUTOREGRESSIVE}
    series = list(dict.fromkeys(name for name, _ in rows))
    categories = [*shown_categories(summary), OVERALL]
    width_inches = 1.1 * len(categories) * max(1, len(series)) ** 0.5 + 2
    figure, axes = plt.subplots(figsize=(min(max(7.0, width_inches), MOST_INCHES), 4.6))
    width = 0.8 / max(1, len(series))
    for number, name in enumerate(series):
        places = [index - 0.4 + width * (number + 0.5) for index in range(len(categories))]
        heights = [rows[name, category][value_key] or 0.0 for category in categories]
        spreads = [rows[name, category][spread_key] or 0.0 for category in categories] if spread_key else None
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
    """With the legend of `axes` below them, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    figure.set_layout_engine("constrained")
    figure.savefig(file, dpi=140)
    plt.close(figure)
    return file


def series_name(row: dict[str, Any], summary: list[dict[str, Any]]) -> str:
    """The method, with its temperature where several were measured, and what must not be overlooked."""
    several = len({other["temperature"] for other in summary}) > 1
    name = f"{row['method']} T={row['temperature']:g}" if several else row["method"]
    return name if row["lossless"] else f"{name} ({NOT_LOSSLESS})"
