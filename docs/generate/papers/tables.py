"""The papers' tables, built from result files (`core/results.py`).

ParallelSpec's (arXiv 2410.05589) flavours compared with the drafters that they replace, and its number of masks;
Leviathan et al.'s (arXiv 2211.17192) tables from the formulas, of n-gram drafters, expected and measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from draftsmith.eval.bench.theory import expected_tokens
from draftsmith.recipes.schema import SEED_SUFFIX

NOT_MEASURED = "-"
TIMES = "{:.2f}x"
# Spec-Bench's tasks in the paper's order; the first is the eight MT-bench categories together.
TASKS = {
    "mt_bench": "MT-bench",
    "translation": "translation",
    "summarization": "summary",
    "qa": "QA",
    "math_reasoning": "maths",
    "rag": "RAG",
}
# Table 1's alphas and gammas.
TABLE_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))
NGRAMS = ("unigram", "bigram", "trigram")


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
        """Return a figure of the row by its dotted path; None if it was not measured."""
        value = self._lookup(path)
        return value if isinstance(value, int | float) else None

    def interval(self, path: str) -> str:
        """Return an interval as text, or a dash."""
        ends = self._lookup(path)
        return f"{ends[0]:.2f} to {ends[1]:.2f}" if isinstance(ends, list) else NOT_MEASURED

    def _lookup(self, path: str) -> Any:
        value: Any = self.row
        for key in path.split("."):
            if isinstance(value, list):
                value = value[int(key)] if int(key) < len(value) else None
            elif isinstance(value, dict):
                value = value.get(key)
        return value

    def text(self, path: str, form: str = "{:.2f}") -> str:
        """Return the figure as text, or a dash where it was not measured."""
        value = self.value(path)
        return NOT_MEASURED if value is None else form.format(value)


def place(results: Path, file: str, method: str, temperature: float) -> Place:
    """Find a method's row at a temperature: in `file`, or in `file_*`, where a table has several runs."""
    key = f"{method}@{temperature:g}"
    runs = [file, *sorted(each.stem for each in results.glob(f"{file}_*.json"))]
    places = [Place(results, run, key) for run in runs]
    return next((each for each in places if each.row), places[0])


@lru_cache(maxsize=16)
def _rows(file: Path, _written_ns: int) -> dict[str, Any]:
    """Read a result file once, as a page asks for a hundred figures of it."""
    rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["figures"]["rows"]
    return rows


def ratio(above: Place, below: Place, path: str, form: str = TIMES) -> str:
    """Divide one figure by another of the same measurement; a dash where either was not measured."""
    top, bottom = above.value(path), below.value(path)
    return form.format(top / bottom) if above.file == below.file and top is not None and bottom else NOT_MEASURED


def table(heads: Sequence[str], rows: list[list[str]], labels: int = 1) -> str:
    """Write a table in Markdown, without rows and columns of which nothing was measured; a sentence if none is left.

    Args:
        labels: The first columns, which say what a row is of.
    """
    empty = ("", NOT_MEASURED)
    measured = [row for row in rows if any(cell not in empty for cell in row[labels:])]
    if not measured:
        return "*Not measured yet.*"
    shown = [n for n in range(len(heads)) if n < labels or any(row[n] not in empty for row in measured)]
    lines = [heads, ["---"] * len(heads), *measured]
    return "\n".join(f"| {' | '.join(line[n] for n in shown)} |" for line in lines)


# ---- ParallelSpec ----


@dataclass(frozen=True)
class Target:
    """A target's table.

    pairs: a drafter and the flavour of ParallelSpec that replaces it, each as what the page calls it and the method in
    the result file; tasks: whether the questions are Spec-Bench's.
    """

    name: str
    file: str
    pairs: tuple[tuple[tuple[str, str], tuple[str, str]], ...]
    tasks: bool


SMOLLM2 = Target(
    "SmolLM2-135M-Instruct",
    "smollm2_table",
    (
        (
            ("Medusa, shared head", "smollm2-135m-medusa/medusa-tree"),
            ("Medusa-ParallelSpec, inner features", "smollm2-135m/smollm2-tree"),
        ),
        (
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
        (("Medusa", "medusa-tree"), ("Medusa-ParallelSpec, final features", "parallel-final-tree")),
        (("Medusa", "medusa-tree"), ("Medusa-ParallelSpec, inner features", "parallel-tree")),
        (("EAGLE", "eagle-tree"), ("EAGLE-ParallelSpec", "eagle-parallel-tree")),
    ),
    tasks=False,
)


def main_table(results: Path, target: Target, temperature: float) -> str:
    """Build the papers' main table: speedup by task, their mean, pooled speedup, tau, and each flavour's gain.

    Results of earlier versions have no interval of the mean over tasks, and those of one task no such mean.
    """
    tasks = [f"by_category.{task}.speedup_mean" for task in TASKS] if target.tasks else []
    over_tasks = ["over_tasks.speedup_mean", "over_tasks.tau"]

    def figures(row: Place) -> list[str]:
        return [
            *(row.text(path, TIMES) for path in tasks),
            row.text(over_tasks[0], TIMES),
            row.interval("over_tasks.speedup_interval"),
            row.text(over_tasks[1]),
            row.text("speedup_mean", TIMES),
            row.interval("speedup_interval"),
            row.text("tau"),
            row.text("timing.cost_ratio"),
        ]

    rows: list[list[str]] = []
    for pair in target.pairs:
        places = [place(results, target.file, method, temperature) for _, method in pair]
        for (name, method), row in zip(pair, places, strict=True):
            rows.append([name, *figures(row)])
            if "/" in method:  # a comparison of several seeds has the recipe's name before the method's
                again = place(results, target.file, method.replace("/", f"{SEED_SUFFIX}1/"), temperature)
                rows.append([f"{name}, second seed", *figures(again)])
        base, flavour = places
        *by_task, speed, tau, pooled, pooled_tau = (
            ratio(flavour, base, path) for path in (*tasks, *over_tasks, "speedup_mean", "tau")
        )
        rows.append(["*flavour over base*", *by_task, speed, "", tau, pooled, "", pooled_tau, ""])
    unique = [row for number, row in enumerate(rows) if row not in rows[:number]]
    names = TASKS.values() if target.tasks else ()
    means = ["mean of tasks", "95 %", "mean tau", "pooled", "95 %", "tau"]
    return table(["drafter, tree of 12", *names, *means, "draft / step"], unique)


def number_of_masks(results: Path, counts: range, file: str = "masks") -> str:
    """Build the ablation of K: chain and tree of the quickstart's drafter, trained with each number of masks."""
    rows = []
    for count in counts:
        names = ("parallel-chain", "parallel-tree")
        chain, tree = (Place(results, file, f"quickstart-num_masks-{count}/{method}@0") for method in names)
        figures = [cell for each in (chain, tree) for cell in (each.text("tau"), each.text("speedup_mean", TIMES))]
        rows.append([str(count), *figures, chain.text("timing.cost_ratio")])
    return table(["K", "tau, chain", "speedup, chain", "tau, tree", "speedup, tree", "draft / step"], rows)


# ---- Leviathan et al. ----


def operations_factor(alpha: float, gamma: int) -> float:
    """Return the arithmetic per token over the target's own, (g + 1)(1 - a) / (1 - a^(g+1)) (theorem 3.11 at c = 0)."""
    return (gamma + 1) / expected_tokens(alpha, gamma)


def operations_and_speed() -> str:
    """Build table 1: arithmetic and speed of a drafter without cost, from theorems 3.8 and 3.11."""
    rows = []
    for alpha, gamma in TABLE_1:
        operations, speed = operations_factor(alpha, gamma), expected_tokens(alpha, gamma)
        rows.append([f"{alpha}", str(gamma), TIMES.format(operations), TIMES.format(speed)])
    return table(["alpha", "gamma", "operations", "speed"], rows)


def ngram_alphas(results: Path, sources: list[tuple[str, str, str, float]]) -> str:
    """Build table 3's last rows: alpha of n-grams counted in the target's answers.

    Args:
        sources: What the page calls the target, result file, what stands before a method's name there, temperature.
    """
    rows = []
    for target, file, before, temperature in sources:
        alphas = (place(results, file, before + name, temperature).text("timing.alpha") for name in NGRAMS)
        rows.append([target, f"{temperature:g}", *alphas])
    return table(["target", "T", *NGRAMS], rows, labels=2)


def expected_and_measured(results: Path, sources: list[tuple[str, str, str, float]]) -> str:
    """Build table 4: theorem 3.8 with the measured alpha and c, and the measured speedup of decoding.

    Args:
        results: The folder of result files.
        sources: (name on the page, result file, method, temperature) of each row.
    """
    columns = {"gamma": "{:d}", "alpha": "{:.2f}", "c": "{:.2f}"}
    columns |= {"speedup_predicted_iid": TIMES, "speedup_decoding": TIMES}
    rows = []
    for name, file, method, temperature in sources:
        row = place(results, file, method, temperature)
        figures = (row.text(f"timing.{key}", form) for key, form in columns.items())
        rows.append([name, f"{temperature:g}", *figures])
    return table(["drafter", "T", "gamma", "alpha", "c", "expected", "measured"], rows, labels=2)
