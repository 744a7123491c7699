"""Figures of result files (`recipes/results.py`) as documents quote them: the number, and a link to where it stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

NOT_MEASURED = "-"


@dataclass(frozen=True)
class Place:
    """One row of one result file: a method at a temperature on a target."""

    folder: Path
    file: str  # without its suffix
    key: str  # `method@temperature`

    @cached_property
    def row(self) -> dict[str, Any] | None:
        """Its figures; None where it was not measured."""
        file = self.folder / f"{self.file}.json"
        return _rows(file, file.stat().st_mtime_ns).get(self.key) if file.exists() else None

    def value(self, path: str) -> float | None:
        """A figure of the row, down through its mappings and lists; None where it was not measured."""
        found: Any = self.row
        for key in path.split("."):
            if isinstance(found, list):
                found = found[int(key)] if int(key) < len(found) else None
            elif isinstance(found, dict):
                found = found.get(key)
        return found if isinstance(found, int | float) else None

    def quoted(self, path: str, form: str = "{:.2f}") -> str:
        """`[2.78](results/name.json#figures.rows.key.path)`, or a dash."""
        value = self.value(path)
        if value is None:
            return NOT_MEASURED
        return f"[{form.format(value)}]({self.folder.name}/{self.file}.json#figures.rows.{self.key}.{path})"


def place(results: Path, file: str, method: str, temperature: float) -> Place:
    """Where a method's row at a temperature stands: in `file`, or in `file_*`, where a table has several runs."""
    key = f"{method}@{temperature:g}"
    runs = [file, *sorted(found.stem for found in results.glob(f"{file}_*.json"))]
    places = [Place(results, run, key) for run in runs]
    return next((found for found in places if found.row), places[0])


@lru_cache(maxsize=16)
def _rows(file: Path, _written_ns: int) -> dict[str, Any]:
    """A page asks for a hundred figures of one file."""
    rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["figures"]["rows"]
    return rows


def ratio(above: Place, below: Place, path: str) -> float | None:
    """One figure of two rows of the same measurement; None where either was not measured."""
    top, bottom = above.value(path), below.value(path)
    if above.file != below.file or top is None or not bottom:
        return None
    return top / bottom


def table(heads: list[str], rows: list[list[str]], labels: int = 1) -> str:
    """In Markdown; a row of which nothing was measured is left out, and of a table without rows a sentence is left.

    Args:
        labels: The first columns, which say what a row is of.
    """
    kept = [row for row in rows if any(cell not in ("", NOT_MEASURED) for cell in row[labels:])]
    if not kept:
        return "*Not measured yet.*"
    lines = [heads, ["---"] * len(heads), *kept]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def told(value: float | None, form: Callable[[float], str]) -> str:
    """A computed figure, or a dash."""
    return NOT_MEASURED if value is None else form(value)
