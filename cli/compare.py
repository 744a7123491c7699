"""`draftsmith compare`: train several recipes and measure them side by side, or compare measured runs.

Recipes: every drafter that is not trained yet is trained, then all are measured in one process. Each recipe keeps its
own run folder; recipes with the same data share one distillation. The table's folder has the comparison's name: same
target, questions, machine and time for every row, and one baseline. A drafter that changes its target (Medusa-2) is
measured against the changed target, in its own run.

Measured runs: each has its own baseline in its own process, so speeds are compared as speedups over it. Every method is
compared with the fastest one of the first run; a paired bootstrap over questions gives the interval of the ratio. If
the questions belong to several tasks, the means over tasks are the headline, which chooses the fastest and judges the
others; the pooled figures are shown next to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftsmith.cli.artifacts import RECORDS
from draftsmith.cli.console import console, print_table
from draftsmith.cli.stages import make_drafter, reuse_data, run_eval
from draftsmith.errors import UserError
from draftsmith.eval.bench.records import SETTINGS, QuestionRecord, RecordLog, check_fair_clock
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report import bootstrap
from draftsmith.eval.report.sentences import verdict_word
from draftsmith.eval.report.summary import headline, question_sums
from draftsmith.eval.report.text import ends_in_brackets
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.recipes.loading import explain
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DRAFTER_KIND, SEED_SUFFIX, MethodConfig, Recipe, check_name

# Keys of the eval section that must be equal in all recipes of a comparison.
SHARED_EVAL_KEYS = (
    "questions", "limit_per_category", "limit_per_task", "max_new_tokens", "stop", "runs", "warmup_questions",
    "temperatures", "top_k", "top_p",
)  # fmt: skip


def with_seeds(recipes: list[Recipe], seeds: int) -> list[Recipe]:
    """Repeat each recipe for every seed, which changes the initial weights and the order of the same examples.

    The first repetition is the recipe itself; methods that need no training are measured with that one only.
    """
    repeated = []
    for recipe in recipes:
        trained = [method for method in recipe.eval.methods if method.kind == DRAFTER_KIND]
        evaluation = recipe.eval.model_copy(update={"methods": trained})
        repeated.append(recipe)
        for number in range(1, seeds):
            train = {**recipe.train, "seed": recipe.train.get("seed", recipe.seed) + number}
            values = {"name": f"{recipe.name}{SEED_SUFFIX}{number}", "train": train, "eval": evaluation}
            repeated.append(recipe.model_copy(update=values))
    return repeated


def compare(
    recipes: list[Recipe], name: str, command: str | None = None, distilled: Sequence[Recipe] = ()
) -> tuple[list[dict[str, Any]], list[Recipe]]:
    """Distil, train and measure all recipes.

    Args:
        name: Name of the common table's run.
        command: Command that repeats the comparison, for its report.
        distilled: Further recipes whose distilled conversations may be reused, such as those that overrides vary.

    Returns:
        The rows of all tables, and the recipe of each table: the common one first, if it was measured.

    Raises:
        UserError: The recipes differ in target or questions, or two of them have the same name.
    """
    _check_comparable(recipes, name)
    kinds = {recipe.name: load_drafter_class(recipe.drafter.kind) for recipe in recipes}
    together = [each for each in recipes if not hasattr(kinds[each.name], "target_change")]
    measured = [joint_recipe(together, name)] if together else []
    for recipe in recipes:
        reuse_data(recipe, [*recipes, *distilled])
        make_drafter(recipe)
    rows = [row for joint in measured for row in run_eval(joint, command)]
    for recipe in recipes:
        if recipe not in together:
            console.print(f"{recipe.name} changes its target: measured in a separate run")
            rows += run_eval(recipe)
            measured.append(recipe)
    return rows, measured


def joint_recipe(recipes: list[Recipe], name: str) -> Recipe:
    """Build a recipe that measures every method of every recipe on the first recipe's questions."""
    own_names = [method.name for recipe in recipes for method in recipe.eval.methods]
    unique = len(set(own_names)) == len(own_names)
    methods: list[MethodConfig] = []
    for recipe in recipes:
        for method in recipe.eval.methods:
            method_name = method.name if unique else f"{recipe.name}/{method.name}"
            drafter = method.drafter or str(RunFolder(recipe).drafter)
            try:
                values = method.model_dump() | {"name": method_name, "drafter": drafter}
                methods.append(MethodConfig.model_validate(values))
            except ValidationError as error:
                raise UserError(f"recipe {recipe.name}: {explain(MethodConfig, error, 'eval.methods')}") from None
    first = recipes[0]
    return first.model_copy(update={"name": name, "eval": first.eval.model_copy(update={"methods": methods})})


def _check_comparable(recipes: list[Recipe], table_name: str) -> None:
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names):
        raise UserError(f"key `name`: the recipes to compare are named {', '.join(names)}: give each a different name")
    if table_name in names:
        raise UserError(f"option --name: {table_name} is the name of a recipe: give the table another name")
    for name in names:  # a seed's number may have made it too long
        try:
            check_name(name)
        except ValueError as error:
            raise UserError(f"key `name`: {error}, not {name!r}") from None
    first = recipes[0]
    for other in recipes[1:]:
        different = [f"eval.{key}" for key in SHARED_EVAL_KEYS if getattr(other.eval, key) != getattr(first.eval, key)]
        if other.target != first.target:
            different.insert(0, "target")
        if different:
            raise UserError(
                f"recipes {first.name} and {other.name} cannot be compared, as {', '.join(different)} differ: "
                f"make them equal, for example with an override for all: {different[0]}=..."
            )


def compare_runs(folders: list[Path]) -> list[dict[str, Any]]:
    """Return a row for each method of each run; for each temperature the first run's fastest is first, the reference.

    Raises:
        UserError: There is only one run, or two runs differ in questions or settings, which the message names.
    """
    if len(folders) < 2:
        raise UserError(f"compare got one run, {folders[0]}, and needs two: name a second run's folder")
    runs = {folder: list(RecordLog(folder / "eval" / RECORDS)) for folder in folders}
    for folder, records in runs.items():
        try:
            check_fair_clock(records)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
    first = runs[folders[0]]
    for folder in folders[1:]:
        _check_same_settings(f"{folders[0]} and {folder} cannot be compared", first, runs[folder])
    order = {question: place for place, question in enumerate(_question_ids(first))}
    for records in runs.values():
        records.sort(key=lambda record: (record.run, order[record.question_id]))
    return [row for temperature in _temperatures(first) for row in _rows(runs, temperature)]


def _rows(runs: dict[Path, list[QuestionRecord]], temperature: float) -> list[dict[str, Any]]:
    """Compute the rows of all methods at a temperature, the reference first."""
    methods = [
        (folder, key, question_sums(records, key), question_sums(records, key, over_tasks=True))
        for folder, records in runs.items()
        for key, answer in records[0].answers.items()
        if answer.method != AUTOREGRESSIVE and answer.temperature == temperature
    ]
    first = next(iter(runs))
    ours = [method for method in methods if method[0] == first]
    if not ours:
        return []
    reference = max(ours, key=lambda method: bootstrap.compute_ratio(bootstrap.speedup, method[-1]))
    rows = []
    for method in [reference, *(method for method in methods if method is not reference)]:
        folder, key, *sums = method
        row: dict[str, Any] = {"run": str(folder), "method": key.rpartition("@")[0], "temperature": temperature}
        pooled, figures = (_compare_to_reference(*both) for both in zip(sums, reference[2:], strict=True))
        tasks = sums[-1].tasks
        over_tasks = None if tasks is None else {"tasks": len(set(tasks)), **figures}
        rows.append({**row, **pooled, "over_tasks": over_tasks, "reference": method is reference})
    return rows


def _compare_to_reference(sums: bootstrap.QuestionSums, reference: bootstrap.QuestionSums) -> dict[str, Any]:
    """Compute tau and speedup, and their ratios to the reference's, each with its interval."""
    row: dict[str, Any] = {}
    for name, figure in (("tau", bootstrap.tau), ("speedup", bootstrap.speedup)):
        value, reference_value = (bootstrap.compute_ratio(figure, each) for each in (sums, reference))
        row |= {name: value, f"{name}_interval": bootstrap.interval(figure, sums)}
        row[f"{name}_ratio"] = value / reference_value
        row[f"{name}_ratio_interval"] = bootstrap.paired_ratio(figure, sums, reference)
    return row


def _question_ids(records: list[QuestionRecord]) -> list[int | str]:
    return list(dict.fromkeys(record.question_id for record in records))


def _temperatures(records: list[QuestionRecord]) -> list[float]:
    return list(dict.fromkeys(answer.temperature for answer in records[0].answers.values()))


def _check_same_settings(both: str, first: list[QuestionRecord], other: list[QuestionRecord]) -> None:
    """Raise UserError unless both runs have the same questions, target and settings."""
    differing = set(_question_ids(first)) ^ set(_question_ids(other))
    if differing:
        example = sorted(map(str, differing))[0]
        raise UserError(
            f"{both}: {len(differing)} question(s) are in one of them only, {example} for example: measure both "
            "with the same eval.questions, limits and max_new_tokens"
        )
    if not set(_temperatures(first)) & set(_temperatures(other)):
        raise UserError(f"{both}: they have no temperature in common: measure both with the same eval.temperatures")
    settings = {
        (record.question_id, key): answer.settings
        for record in other
        for key, answer in record.answers.items()
        if answer.method == AUTOREGRESSIVE
    }
    for record in first:
        for key, answer in record.answers.items():
            theirs = settings.get((record.question_id, key), answer.settings)
            different = [SETTINGS[name] for name in SETTINGS if answer.settings[name] != theirs[name]]
            if answer.method == AUTOREGRESSIVE and different:
                raise UserError(
                    f"{both}: question {record.question_id} was answered with different {', '.join(different)} in the "
                    "two runs: measure both with the same settings"
                )


def show_runs(rows: list[dict[str, Any]]) -> None:
    """Print the rows as tables, one for each temperature."""
    headings = ("run", "method", "tau", "speedup", "speed against the first", "")
    tasks = (rows[0]["over_tasks"] or {}).get("tasks") if rows else None
    over = f"means over {tasks} tasks of equal weight" if tasks else "pooled over all questions"
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        cells = [
            (
                row["run"],
                row["method"],
                *(f"{shown[name]:.2f}{ends_in_brackets(shown[f'{name}_interval'])}" for name in ("tau", "speedup")),
                "" if row["reference"] else _ratio(shown),
                "the reference" if row["reference"] else verdict_word(shown["speedup_ratio_interval"]),
                *(
                    [f"{row['tau']:.2f}", f"{row['speedup']:.2f}", "" if row["reference"] else _ratio(row)]
                    * bool(tasks)
                ),
            )
            for row, shown in ((row, headline(row)) for row in rows if row["temperature"] == temperature)
        ]
        pooled = ("pooled: tau", "speedup", "against the first") if tasks else ()
        print_table((*headings, *pooled), cells, f"T = {temperature:g}, {over}; intervals of 95 % over questions")
    console.print(
        "speedup: over the baseline of the same run, measured in the same process; a load on the machine slows both "
        "and mostly cancels",
        style="italic",
    )


def _ratio(figures: dict[str, Any]) -> str:
    return f"{figures['speedup_ratio']:.2f}x{ends_in_brackets(figures['speedup_ratio_interval'])}"
