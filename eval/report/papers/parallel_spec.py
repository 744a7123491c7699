"""ParallelSpec's tables (arXiv 2410.05589): its flavours beside what they replace, and the number of masks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftsmith.eval.report.papers.quoted import NOT_MEASURED, Place, place, ratio, table, told
from draftsmith.recipes.schema import SEED_SUFFIX

# Spec-Bench's tasks in the paper's order; the first is the eight MT-bench categories together.
TASKS = {
    "mt_bench": "MT-bench",
    "translation": "translation",
    "summarization": "summary",
    "qa": "QA",
    "math_reasoning": "maths",
    "rag": "RAG",
}


@dataclass(frozen=True)
class Pair:
    """A drafter and the flavour of ParallelSpec that replaces it: the methods' names in the result file."""

    base: tuple[str, str]  # what the page calls it, the method
    flavour: tuple[str, str]


@dataclass(frozen=True)
class Target:
    """Where a target's table stands."""

    name: str
    file: str
    pairs: tuple[Pair, ...]
    tasks: bool  # whether the questions are Spec-Bench's


SMOLLM2 = Target(
    "SmolLM2-135M-Instruct",
    "smollm2_table",
    (
        Pair(
            ("Medusa", "smollm2-135m-medusa/medusa-tree"),
            ("Medusa-ParallelSpec, inner features", "smollm2-135m/smollm2-tree"),
        ),
        Pair(
            ("EAGLE", "smollm2-135m-eagle/eagle-tree"),
            ("EAGLE-ParallelSpec, two stages", "smollm2-135m-two_stage/two-stage-tree"),
        ),
    ),
    tasks=True,
)
EMBEDDED = Target(
    "the embedded target",
    "table",
    (
        Pair(("Medusa", "medusa-tree"), ("Medusa-ParallelSpec, final features", "parallel-final-tree")),
        Pair(("Medusa", "medusa-tree"), ("Medusa-ParallelSpec, inner features", "parallel-tree")),
        Pair(("EAGLE", "eagle-tree"), ("EAGLE-ParallelSpec", "eagle-parallel-tree")),
    ),
    tasks=False,
)


def main_table(results: Path, target: Target, temperature: float) -> str:
    """The papers' main table: speedup by task and over all questions, tau, and each flavour over what it replaces."""
    tasks = TASKS if target.tasks else {}
    rows: list[list[str]] = []
    for pair in target.pairs:
        base, flavour = (place(results, target.file, method, temperature) for _, method in (pair.base, pair.flavour))
        for (name, method), found in zip((pair.base, pair.flavour), (base, flavour), strict=True):
            rows.append([name, *_figures(found, tasks)])
            if "/" in method:  # a comparison of several seeds has the recipe's name before the method's
                again = place(results, target.file, method.replace("/", f"{SEED_SUFFIX}1/"), temperature)
                rows.append([f"{name}, second seed", *_figures(again, tasks)])
        faster = [told(ratio(flavour, base, f"by_category.{task}.speedup_mean"), _times) for task in tasks]
        overall = told(ratio(flavour, base, "speedup_mean"), _times)
        rows.append(["*flavour over base*", *faster, overall, told(ratio(flavour, base, "tau"), _times), "", ""])
    unique = [row for number, row in enumerate(rows) if row not in rows[:number]]
    return table(["drafter, tree of 12", *tasks.values(), "overall", "tau", "draft / step", "95 %"], unique)


def _figures(found: Place, tasks: dict[str, str]) -> list[str]:
    interval = (found.row or {}).get("speedup_interval")
    return [
        *(found.quoted(f"by_category.{task}.speedup_mean", "{:.2f}x") for task in tasks),
        found.quoted("speedup_mean", "{:.2f}x"),
        found.quoted("tau"),
        found.quoted("timing.cost_ratio"),
        f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else NOT_MEASURED,
    ]


def number_of_masks(results: Path, counts: range, file: str = "masks") -> str:
    """The ablation of K: chain and tree of the quickstart's drafter, trained with each number of masks."""
    rows = []
    for count in counts:
        chain, tree = (
            Place(results, file, f"quickstart-num_masks-{count}/{method}@0")
            for method in ("parallel-chain", "parallel-tree")
        )
        rows.append(
            [
                str(count),
                chain.quoted("tau"),
                chain.quoted("speedup_mean", "{:.2f}x"),
                tree.quoted("tau"),
                tree.quoted("speedup_mean", "{:.2f}x"),
                chain.quoted("timing.cost_ratio"),
            ]
        )
    return table(["K", "tau, chain", "speedup, chain", "tau, tree", "speedup, tree", "draft / step"], rows)


def _times(value: float) -> str:
    return f"{value:.2f}x"
