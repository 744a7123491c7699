"""ParallelSpec's figure 5 as measured: an answer whose tokens show who made them, a block for each method."""

from __future__ import annotations

from html import escape
from pathlib import Path

from draftsmith.eval.report.page.rounds import ShownAnswer, ShownQuestion
from draftsmith.recipes.run_folder import write_atomically

COLUMNS, CHARACTER, LINE, MARGIN, FONT_SIZE = 92, 7.8, 20, 14, 13  # all but the first in SVG units
DRAFTED, TEXT, FAINT, PAPER = "#b7e3c0", "#1f2328", "#59636e", "#ffffff"


def draw_answer(question: ShownQuestion, file: Path) -> Path:
    """An SVG with a white ground, as pictures stand on light and on dark pages.

    Args:
        question: With its answers, in the order of their blocks.
        file: Written.
    """
    lines: list[str] = []
    row = 1
    for answer in question.answers:
        lines.append(_text(0, row, f"{answer.method}: {answer.tokens} tokens in {len(answer.rounds)} rounds", FAINT))
        row, drawn = _block(answer, row + 1)
        lines += drawn
        row += 2
    width, height = round(2 * MARGIN + COLUMNS * CHARACTER), round(MARGIN + LINE * (row - 1))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="ui-monospace, monospace" font-size="{FONT_SIZE}">'
    )
    title = f"<title>Answers to: {escape(question.prompt)} Tokens on green were drafted and accepted.</title>"
    ground = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    write_atomically(file, "\n".join([head, title, ground, *lines, "</svg>", ""]))
    return file


def pieces(answer: ShownAnswer) -> list[tuple[str, bool]]:
    """(text, whether it was drafted), in the order of the answer."""
    found = [(answer.first, False)]
    for each in answer.rounds:
        found += [(each.drafted, True), (each.own or "", False)]
    return [(text, drafted) for text, drafted in found if text]


def _block(answer: ShownAnswer, row: int) -> tuple[int, list[str]]:
    """The row it ends in, and its elements: wrapped at COLUMNS and where the text has a line break."""
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
    """`textLength` keeps the columns where a machine's font is wider or narrower."""
    x, y = MARGIN + column * CHARACTER, row * LINE + 6
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" textLength="{len(text) * CHARACTER:.1f}" '
        f'xml:space="preserve">{escape(text)}</text>'
    )
