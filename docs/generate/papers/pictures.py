"""ParallelSpec's figures as measured.

Figure 1: how long a round takes, what of it is drafting, and how many tokens it commits. Figure 5: an answer whose
tokens show who made them, a block for each method. Also Leviathan's figures 2, 3 and 4 with measured points.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from generate.papers.tables import Place, operations_factor

from draftsmith.eval.bench.traced import TracedAnswer
from draftsmith.eval.report.page.curves import ALPHAS, GAMMAS, THEORY, TheoryPanel
from draftsmith.files import write_atomically

COLUMNS, CHARACTER, LINE, MARGIN, FONT_SIZE = 92, 7.8, 20, 14, 13  # all but the first in SVG units
DRAFTED, TEXT, FAINT, PAPER = "#b7e3c0", "#1f2328", "#59636e", "#ffffff"
# Palette of Okabe and Ito, which colour-blind readers can distinguish too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
OPERATIONS = TheoryPanel("Figure 4: operations at c = 0", "gamma", GAMMAS, operations_factor, "operations_measured")
THEORY_FILES = {"theory_tokens": THEORY[:1], "theory_gamma": THEORY[1:2], "theory_speedup": (THEORY[2], OPERATIONS)}
HIGHEST = {"gamma": 30.0, "operations_measured": 7.0}  # of a figure's axis, by the key of its points
MARKERS = "osD^vP*X<>"
SHADES = ("#222222", "#999999", "#8B0000")  # of the first ten methods, the next, ...
PHASES = {
    "t_draft_s": "drafting",
    "t_verify_forward_s": "the target's forward over the draft",
    "t_choose_s": "choosing the path",
    "t_commit_s": "keeping it",
}


def draw_rounds(places: dict[str, Place], file: Path) -> list[str]:
    """Draw one bar per method, in units of the target's step, labelled with the tokens that a round commits.

    Args:
        places: Results by the methods' names in the picture.
        file: The SVG file.

    Returns:
        The names of the measured methods; without any no file is written.
    """
    measured = {name: place for name, place in places.items() if place.value("timing.t_target_step_s")}
    if not measured:
        return []
    with matplotlib.rc_context({"svg.hashsalt": "draftsmith", "svg.fonttype": "none", "font.size": 11}):
        figure, axes = plt.subplots(figsize=(9.5, 0.9 + 0.52 * (len(measured) + 1)))
        axes.barh([0], [1.0], color="#999999", height=0.6)
        axes.text(1.02, 0, "one token", va="center")
        for number, place in enumerate(measured.values(), start=1):
            left = 0.0
            for colour, phase in zip(COLOURS, PHASES, strict=False):
                width = steps(place, phase)
                axes.barh([number], [width], left=left, color=colour, height=0.6)
                left += width
            axes.text(left + 0.02, number, f"{place.value('tau'):.2f} tokens", va="center")
        axes.set_yticks(range(len(measured) + 1), ["a single step", *measured])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
        axes.set_xlabel("time of a round, in single steps of the target")
        axes.spines[["top", "right"]].set_visible(False)
        handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour, _ in zip(COLOURS, PHASES, strict=False)]
        axes.legend(handles, list(PHASES.values()), frameon=False, fontsize=9, loc="lower right")
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
    return list(measured)


def steps(place: Place, phase: str) -> float:
    """Return a phase's median time over a single step's; 0 for phases that older results did not time."""
    return (place.value(f"timing.{phase}") or 0.0) / (place.value("timing.t_target_step_s") or 1.0)


def draw_answer(answers: list[TracedAnswer], file: Path) -> Path:
    """Write an SVG with a white background, for light and dark pages.

    Args:
        answers: Traced answers to one question, in the order of their blocks.
        file: SVG file to write.
    """
    lines: list[str] = []
    row = 1
    for answer in answers:
        lines.append(_text(0, row, f"{answer.method}: {answer.tokens} tokens in {len(answer.rounds)} rounds", FAINT))
        row, drawn = _block(answer, row + 1)
        lines += drawn
        row += 2
    width, height = round(2 * MARGIN + COLUMNS * CHARACTER), round(MARGIN + LINE * (row - 1))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="ui-monospace, monospace" font-size="{FONT_SIZE}">'
    )
    title = f"<title>Answers to: {escape(answers[0].shown_prompt)} Tokens on green were drafted and accepted.</title>"
    ground = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    write_atomically(file, "\n".join([head, title, ground, *lines, "</svg>", ""]))
    return file


def pieces(answer: TracedAnswer) -> list[tuple[str, bool]]:
    """Split an answer into (text, whether it was drafted)."""
    parts = [(answer.first, False)]
    for each in answer.rounds:
        parts += [(each.drafted, True), (each.own or "", False)]
    return [(text, drafted) for text, drafted in parts if text]


def _block(answer: TracedAnswer, row: int) -> tuple[int, list[str]]:
    """Return the last row and the elements, wrapped at COLUMNS and at the text's line breaks."""
    lines: list[str] = []
    column = 0
    for text, drafted in pieces(answer):
        for number, part in enumerate(text.split("\n")):
            if number:
                row, column = row + 1, 0
            while part:
                here, part = part[: COLUMNS - column], part[COLUMNS - column :]
                if drafted:
                    x, y = MARGIN + column * CHARACTER, MARGIN + (row - 1) * LINE
                    size = f'width="{len(here) * CHARACTER:.1f}" height="{LINE - 3}"'
                    lines.append(f'<rect x="{x:.1f}" y="{y - 1:.1f}" {size} rx="2" fill="{DRAFTED}"/>')
                lines.append(_text(column, row, here, TEXT))
                column += len(here)
                if column == COLUMNS:
                    row, column = row + 1, 0
    return row, lines


def _text(column: int, row: int, text: str, colour: str) -> str:
    """Return a text element; `textLength` keeps the columns aligned with any font."""
    x, y = MARGIN + column * CHARACTER, row * LINE + 6
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" textLength="{len(text) * CHARACTER:.1f}" '
        f'xml:space="preserve">{escape(text)}</text>'
    )


def draw_theory(timing: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write Leviathan's figures with measured points, as `theory_tokens.png`, `theory_gamma.png`, `theory_speedup.png`.

    Args:
        timing: Rows of `summarize_timing`.
    """
    files = []
    for name, panels in THEORY_FILES.items():
        figure, (every,) = plt.subplots(1, len(panels), figsize=(6.4 if len(panels) == 1 else 11.0, 4.6), squeeze=False)
        for axes, panel in zip(every, panels, strict=True):
            _draw_panel(axes, panel, timing)
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        figure.set_layout_engine("constrained")
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=140)
        plt.close(figure)
    return files


def _draw_panel(axes: Any, panel: TheoryPanel, rows: list[dict[str, Any]]) -> None:
    """Draw the curves, and one marker per method whose figure was measured."""
    for colour, value in zip(COLOURS, panel.values, strict=False):
        axes.plot(ALPHAS, panel.over_alphas(value), color=colour, linewidth=1.2, label=f"{panel.parameter} = {value:g}")
    for number, row in enumerate(rows):
        if row[panel.key] is not None:
            marker, shade = MARKERS[number % len(MARKERS)], SHADES[number // len(MARKERS) % len(SHADES)]
            name = f"{row['method']} T={row['temperature']:g}"
            axes.plot([row["alpha"]], [row[panel.key]], marker, color=shade, markersize=7, label=name, zorder=3)
    if panel.key in HIGHEST:
        axes.set_ylim(0, HIGHEST[panel.key])
    axes.set_xlim(0, 1)
    axes.set_xlabel("alpha")
    axes.set_title(panel.title, fontsize=10)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
