"""Figures and names as the report writes them: filters of its templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from draftsmith.recipes.results import portable

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
    """Whether the greedy answers are the target's; of a method with lenience nobody claims it."""
    if not row["lossless"]:
        return NOT_LOSSLESS
    if row["greedy_identical"] is False and only_ties(row):
        return f"but for {row['numerical_ties']} ties"
    return {True: "yes", False: "NO", None: "-"}[row["greedy_identical"]]


def only_ties(row: dict[str, Any]) -> bool:
    """Whether every answer of a greedy row that differs, if any, was found to part at a numerical tie."""
    return bool(row["different_answers"] == row["numerical_ties"])


def escaped(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return re.sub(r"([\\`*\[\]<>|~$&]|\b_|_\b)", r"\\\1", " ".join(text.split()))


def target_name(target: dict[str, Any]) -> str:
    """What the target is called, wherever it is stored: its GGUF file, its folder's name, or its id on the Hub.

    Args:
        target: The recipe's section.
    """
    if target["gguf_file"]:
        return Path(target["gguf_file"]).name
    return place_name(target["model"])


def place_name(source: str) -> str:
    """The last part of a path of this machine; names of the Hub as they are."""
    is_path = source.startswith(("/", "~", ".", "\\")) or re.match(r"[A-Za-z]:[/\\]", source)
    if is_path or source.count("/") > 1 or Path(source).suffix in (".jsonl", ".json"):
        return Path(source).name
    return source


def drafter_name(folder: str) -> str:
    """Name a drafter: by its run, else by its folder, or by its id on the Hub."""
    path = Path(folder)
    return path.parent.name if path.name == "drafter" and path.parent.name else place_name(folder)


def without_places(text: str, root: Path | None = None) -> str:
    """The text with paths of this machine cut down to their last part: a report is read elsewhere.

    Args:
        root: A run's folder, of which the last two parts stay.
    """
    if root is not None and root.is_absolute():
        text = text.replace(root.as_posix(), "/".join(root.parts[-2:]))
    return str(portable(text))
