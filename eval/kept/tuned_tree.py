"""The draft tree that `draftsmith tune` found: it lies in the drafter's config, and `tree: tuned` stands for it."""

import json
from pathlib import Path
from typing import Any

from draftsmith.eval.bench.arms import drafter_folder
from draftsmith.models.base.registry import drafter_config
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import write_atomically
from draftsmith.recipes.schema import MethodRecipe, Recipe

TUNED_TREE = "tuned_tree"  # the key of the drafter's config


def with_tuned_trees(recipe: Recipe) -> Recipe:
    """The recipe with every `tree: tuned` replaced by the tree that its drafter was tuned to."""
    methods = [resolve_tuned(method, drafter_folder(recipe, method)) for method in recipe.eval.methods]
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": methods})})


def resolve_tuned(method: MethodRecipe, drafter_folder: Path) -> MethodRecipe:
    """The tree in the drafter's config; best-first where it was never tuned."""
    if method.tree != "tuned":
        return method
    config = drafter_config(drafter_folder)
    if TUNED_TREE not in config:
        return method.model_copy(update={"tree": "best_first"})
    try:
        tuned = MethodRecipe.model_validate({**config[TUNED_TREE], "name": method.name})
    except (TypeError, ValueError):
        raise UserError(
            f"{drafter_folder / 'config.json'}: `{TUNED_TREE}` is no tree any more: delete that key, then tune again"
        ) from None
    return method.model_copy(update=shape_of(tuned))


def write_tuned(drafter_folder: Path, method: MethodRecipe) -> None:
    """Note the tree down in the drafter's config, which goes wherever its weights go."""
    config = {**drafter_config(drafter_folder), TUNED_TREE: shape_of(method)}
    write_atomically(drafter_folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def shape_of(method: MethodRecipe) -> dict[str, Any]:
    """What makes the tree, without the row's name."""
    return {key: getattr(method, key) for key in ("tree", "max_depth", "nodes", "branch", "paths", "lookup")}


def describe(method: MethodRecipe) -> str:
    depth = "" if method.max_depth is None else f" to depth {method.max_depth}"
    size = f" of {method.nodes} nodes" if method.best_first else ""
    return f"{method.tree}{size}{depth}{' with lookups' if method.lookup else ''}"
