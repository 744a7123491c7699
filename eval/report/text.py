"""Formatting of figures and names in the report: filters of its templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.hub import hub_id

NOT_LOSSLESS = "not lossless"  # a method with lenience


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def interval(ends: list[float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def ends_in_brackets(ends: list[float] | None) -> str:
    return "" if ends is None else f" ({interval(ends)})"


def percent(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}%}"


def milliseconds(seconds: float | None, digits: int = 2) -> str:
    return number(None if seconds is None else 1000 * seconds, digits)


def identity(row: dict[str, Any]) -> str:
    """Return in a word whether a row's greedy answers equal the target's; with lenience it is "not lossless"."""
    if not row["lossless"]:
        return NOT_LOSSLESS
    if row["greedy_identical"] is False and only_ties(row):
        return f"but for {row['numerical_ties']} ties"
    return {True: "yes", False: "NO", None: "-"}[row["greedy_identical"]]


def only_ties(row: dict[str, Any]) -> bool:
    """Return whether all answers of a row that differ from the target's do so first at a numerical tie."""
    return bool(row["different_answers"] == row["numerical_ties"])


def drafter_name(folder: str) -> str:
    """Return a drafter's name: its run's, else its folder's, or its Hub id."""
    path = Path(folder)
    if path.name == "drafter" and path.parent.name:
        return path.parent.name
    return folder if hub_id(folder) is not None else path.name
