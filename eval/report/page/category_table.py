"""Every method by every category, as a table with tinted cells: readable with as many methods as one likes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.categories import parts_of_mt_bench, shown_categories
from draftsmith.eval.report.page.verdict import NO_GAIN, SLOWER, verdict_word
from draftsmith.eval.report.summary import OVERALL
from draftsmith.eval.report.text import NOT_LOSSLESS

# Speedups from which a cell has the next tint.
LEVELS = (1.0, 1.25, 1.5, 2.0, 2.5)


@dataclass(frozen=True)
class Cell:
    """tint: a class of the style sheet; row: of the summary."""

    tint: str
    row: dict[str, Any]


@dataclass(frozen=True)
class CategoryTable:
    """Of one temperature: [categories] and by method a cell of each, the fastest method first."""

    temperature: float
    categories: list[str]
    rows: list[tuple[str, list[Cell | None]]]


def category_tables(summary: list[dict[str, Any]]) -> list[CategoryTable]:
    """Tasks or categories, and over all questions."""
    return _tables(summary, [*shown_categories(summary), OVERALL])


def mt_bench_tables(summary: list[dict[str, Any]]) -> list[CategoryTable]:
    """What `mt_bench` consists of, where that is a column of the others."""
    parts = parts_of_mt_bench(summary)
    return _tables(summary, parts) if parts else []


def tint(row: dict[str, Any]) -> str:
    """By the speedup; what is shown to be neither gain nor loss is tinted like neither."""
    word = verdict_word(row["speedup_interval"])
    if word == NO_GAIN:
        return "plain"
    if word == SLOWER or row["speedup_mean"] < LEVELS[0]:
        return "slow"
    return f"level-{sum(row['speedup_mean'] >= level for level in LEVELS)}"


def _tables(summary: list[dict[str, Any]], categories: list[str]) -> list[CategoryTable]:
    drafted = [row for row in summary if row["method"] != AUTOREGRESSIVE]
    cells = {(_key(row), row["category"]): Cell(tint(row), row) for row in drafted}
    tables = []
    for temperature in sorted({row["temperature"] for row in drafted}):
        overall = [row for row in drafted if row["temperature"] == temperature and row["category"] == OVERALL]
        overall.sort(key=lambda row: -row["speedup_mean"])
        rows = [(_name(row), [cells.get((_key(row), category)) for category in categories]) for row in overall]
        tables.append(CategoryTable(temperature, categories, rows))
    return tables


def _key(row: dict[str, Any]) -> tuple[str, float]:
    return row["method"], row["temperature"]


def _name(row: dict[str, Any]) -> str:
    return row["method"] if row["lossless"] else f"{row['method']} ({NOT_LOSSLESS})"
