"""Several recipes side by side: train what is not trained, then measure every drafter in one process.

Each recipe keeps its own run folder. Conversations are distilled once for all recipes that ask for the same. The table
lies under the comparison's own name: same target, questions, machine and minute for every row, and one baseline.
A drafter that changes its target (Medusa-2) is measured against the changed target, in a run of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftsmith.eval.commands.stages import make_drafter, reuse_data, run_eval
from draftsmith.eval.commands.terminal.console import console
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import explain, load_recipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DRAFTER_KIND, SEED_SUFFIX, MethodRecipe, Recipe, check_name

# What every recipe of a comparison must say alike: who answers which questions, and how.
SHARED_EVAL_KEYS = (
    "questions", "limit_per_category", "limit_per_task", "max_new_tokens", "stop", "runs", "warmup_questions",
    "temperatures", "top_k", "top_p",
)  # fmt: skip


def expand_variants(recipe: str | Path, overrides: list[str], vary: str) -> list[Recipe]:
    """One recipe for each value of one key: `drafter.options.num_masks=1,2,3` makes three, named after the value.

    Raises:
        UserError: `vary` is not `section.key=value,value,...`.
    """
    key, separator, values = vary.partition("=")
    if not separator or not key or not all(values.split(",")):
        raise UserError(f"--vary `{vary}` must look like section.key=value,value, e.g. drafter.options.num_masks=2,4")
    base = load_recipe(recipe, overrides)
    leaf = key.rsplit(".", 1)[-1]
    variants = []
    for value in values.split(","):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{base.name}-{leaf}-{value}")
        variants.append(load_recipe(recipe, [*overrides, f"{key}={value}", f"name={name}"]))
    return variants


def with_seeds(recipes: list[Recipe], seeds: int) -> list[Recipe]:
    """Each recipe as often as there are seeds: other initial weights and another order of the same rows.

    The first is the recipe itself. What needs no training is measured with that one only.
    """
    return [
        recipe
        if number == 0
        else recipe.model_copy(
            update={
                "name": f"{recipe.name}{SEED_SUFFIX}{number}",
                "train": {**recipe.train, "seed": recipe.train.get("seed", recipe.seed) + number},
                "eval": recipe.eval.model_copy(
                    update={"methods": [method for method in recipe.eval.methods if method.kind == DRAFTER_KIND]}
                ),
            }
        )
        for recipe in recipes
        for number in range(seeds)
    ]


def compare(
    recipes: list[Recipe], name: str, command: str | None = None, distilled: Sequence[Recipe] = ()
) -> tuple[list[dict[str, Any]], list[Recipe]]:
    """Distil, train and measure all of them.

    Args:
        name: Of the common table's run.
        command: What repeats the comparison, for its report.
        distilled: Others whose conversations may be there already, such as the recipe that variants are made of.

    Returns:
        The rows of all tables, and the recipe of each: the common one first, if there is one.

    Raises:
        UserError: The recipes differ in target or questions, or two of them have one name.
    """
    _check_comparable(recipes, name)
    together = [recipe for recipe in recipes if not _changes_target(recipe)]
    measured = [joint_recipe(together, name)] if together else []
    for recipe in recipes:
        reuse_data(recipe, [*recipes, *distilled])
        make_drafter(recipe)
    rows = [row for joint in measured for row in run_eval(joint, command)]
    for recipe in recipes:
        if recipe not in together:
            console.print(f"{recipe.name} changes its target: measured in a run of its own")
            rows += run_eval(recipe)
            measured.append(recipe)
    return rows, measured


def joint_recipe(recipes: list[Recipe], name: str) -> Recipe:
    """The first recipe's questions, asked of every method of every recipe."""
    own_names = [method.name for recipe in recipes for method in recipe.eval.methods]
    unique = len(set(own_names)) == len(own_names)
    methods: list[MethodRecipe] = []
    for recipe in recipes:
        for method in recipe.eval.methods:
            method_name = method.name if unique else f"{recipe.name}/{method.name}"
            drafter = method.drafter or str(RunFolder(recipe).drafter)
            try:
                values = method.model_dump() | {"name": method_name, "drafter": drafter}
                methods.append(MethodRecipe.model_validate(values))
            except ValidationError as error:
                raise UserError(f"recipe {recipe.name}: {explain(MethodRecipe, error, 'eval.methods')}") from None
    first = recipes[0]
    return first.model_copy(update={"name": name, "eval": first.eval.model_copy(update={"methods": methods})})


def _check_comparable(recipes: list[Recipe], table_name: str) -> None:
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names):
        raise UserError(f"the recipes to compare are called {', '.join(names)}: give each a `name` of its own")
    if table_name in names:
        raise UserError(f"option --name: {table_name} is one of the recipes: give the table a folder of its own")
    for name in names:  # with a seed's number it may have become too long
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
                f"make them alike, for example with an override for all: {different[0]}=..."
            )


def _changes_target(recipe: Recipe) -> bool:
    """Whether the recipe's kind of drafter has something to say about it."""
    return load_drafter_class(recipe.drafter.kind).target_change is not Drafter.target_change
