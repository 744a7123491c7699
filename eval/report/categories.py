"""Which categories stand beside each other: none twice, as when a task is shown beside the categories it is made of.

Spec-Bench has six tasks, of which `mt_bench` is eight categories together. Where the summary has it, the tasks are
shown, and what it consists of in a table of its own.
"""

from __future__ import annotations

from typing import Any

from draftsmith.data.sources.questions import MT_BENCH, task_of
from draftsmith.eval.report.summary import OVERALL


def shown_categories(summary: list[dict[str, Any]]) -> list[str]:
    """Every question belongs to exactly one of them; `overall` is not among them."""
    categories = _categories(summary)
    if MT_BENCH not in categories:
        return categories
    return [category for category in categories if category == MT_BENCH or task_of(category) != MT_BENCH]


def parts_of_mt_bench(summary: list[dict[str, Any]]) -> list[str]:
    """The categories that `mt_bench` stands for, where it is shown itself."""
    categories = _categories(summary)
    if MT_BENCH not in categories:
        return []
    return [category for category in categories if category != MT_BENCH and task_of(category) == MT_BENCH]


def _categories(summary: list[dict[str, Any]]) -> list[str]:
    return [each for each in dict.fromkeys(row["category"] for row in summary) if each != OVERALL]
