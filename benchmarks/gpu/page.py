"""The summary page, in Markdown, from the steps' figures. Needs no torch: it is written after every step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.results import folded_json

ERROR, SKIPPED = ".error", ".skipped"  # as in `step.py`
MOST_CHARACTERS = 200  # of a line about an error


def load_figures(folder: Path, name: str) -> dict[str, Any]:
    """Read a step's figures; empty if it has none."""
    try:
        values = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:MOST_CHARACTERS] if lines else ""


def problems(figures: dict[str, Any]) -> list[str]:
    """Return a line for every part that failed, with its exception's last line, was left out, or has a false figure."""
    failed = [f"{key.removesuffix(ERROR)}: {last_line(str(figures[key]))}" for key in figures if key.endswith(ERROR)]
    skipped = [f"{key.removesuffix(SKIPPED)} left out: {figures[key]}" for key in figures if key.endswith(SKIPPED)]
    return failed + skipped + [f"{name} is false" for name in _false_figures(figures)]


def _false_figures(figures: dict[str, Any], parent: str = "") -> Iterator[str]:
    """Yield the dotted names of figures that are false, as `eagle.parity.is_within_tolerance`."""
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from _false_figures(value, f"{parent}{key}.")
        elif value is False:
            yield f"{parent}{key}"


def summary(title: str, outcomes: list[dict[str, Any]], figures: dict[str, dict[str, Any]]) -> str:
    """Write the page: a table of the steps, and the figures of each.

    Args:
        outcomes: Of each step that has run: its `step`, `exit` code, `seconds`, `limit_s` and `problems`.
        figures: The figures of each step.
    """
    head = ("| step | exit code | seconds | limit | failed, left out or false |", "|---|---|---|---|---|")
    lines = [f"# {title}", "", *head]
    for each in outcomes:
        found = "; ".join(each["problems"]).replace("|", "/")
        lines.append(f"| {each['step']} | {each['exit']} | {each['seconds']} | {each['limit_s']} | {found} |")
    for name, values in figures.items():
        lines += ["", f"## {name}", "", "```json", folded_json(values), "```"]
    return "\n".join(lines) + "\n"
