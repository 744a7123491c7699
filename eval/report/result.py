"""An evaluation's figures for `recipes/results.py`: what a document may quote, each under a name of its own."""

import statistics
from pathlib import Path
from typing import Any

from draftsmith.eval.report.seed_spread import seed_spread
from draftsmith.eval.report.summary import OVERALL
from draftsmith.recipes.schema import MethodRecipe, Recipe

OF_A_CATEGORY = (
    "tau", "tau_without_bonus", "speedup_mean", "speedup_std", "tokens", "greedy_identical",
    "different_answers", "numerical_ties",
)  # fmt: skip


def evaluation_figures(
    recipe: Recipe,
    summary: list[dict[str, Any]],
    timing: list[dict[str, Any]],
    questions: int,
    proof: Any,
    baseline: list[dict[str, Any]],
) -> dict[str, Any]:
    """By `method@temperature`: the row over all questions, a round's time, and the main figures by category.

    Beside them what each method was asked for, as `eval.methods` takes it. `over_tasks`: means over Spec-Bench's tasks,
    each of which counts alike, however long its answers are.

    Args:
        summary: Rows of `summarize`.
        timing: Rows of `summarize_timing`.
        questions: How many were asked.
        proof: What `draftsmith prove` found, if it was run.
        baseline: Rows of `baseline_speeds`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for row in summary:
        figures = rows.setdefault(_key(row), {})
        if row["category"] == OVERALL:
            figures |= row
        else:
            by_category = figures.setdefault("by_category", {})
            by_category[row["category"]] = {key: row[key] for key in OF_A_CATEGORY}
    for name, figures in rows.items():
        tasks = [row for row in summary if _key(row) == name and row["category"] == row.get("task")]
        if len(tasks) > 1:
            means = {key: statistics.fmean(row[key] for row in tasks) for key in ("tau", "speedup_mean")}
            figures["over_tasks"] = {"tasks": len(tasks), **means}
    for row in timing:
        rows[_key(row)]["timing"] = row
    settings = recipe.eval.model_dump(include={"questions", "max_new_tokens", "runs", "stop", "top_k", "top_p"})
    return {
        "recipe": recipe.name,
        "target": recipe.target.gguf_file or recipe.target.model,
        "dtype": recipe.target.dtype,
        "asked": questions,
        "settings": settings,
        "methods": {method.name: _as_asked(method) for method in recipe.eval.methods},
        "rows": rows,
        "over_seeds": {_key(row): row for row in seed_spread(summary)},
        "proof": proof,
        "baseline": baseline,
    }


def _as_asked(method: MethodRecipe) -> dict[str, Any]:
    """What is not the default; of a drafter's folder the last two parts, which no machine's other folders shorten."""
    asked = method.model_dump(exclude_defaults=True, exclude={"name"})
    if method.drafter is not None:
        asked["drafter"] = "/".join(Path(method.drafter).parts[-2:])
    return asked


def _key(row: dict[str, Any]) -> str:
    return f"{row['method']}@{row['temperature']:g}"
