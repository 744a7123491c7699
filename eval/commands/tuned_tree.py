"""The draft tree that `draftsmith tune` found: it lies in the drafter's config, and `tree: tuned` stands for it."""

import json
from pathlib import Path
from typing import Any

from draftsmith.eval.bench.arms import drafter_folder
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
    file = drafter_folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return method.model_copy(update=config.get(TUNED_TREE, {"tree": "best_first"}))


def write_tuned(drafter_folder: Path, method: MethodRecipe) -> None:
    """Note the tree down in the drafter's config, which goes wherever its weights go."""
    file = drafter_folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config[TUNED_TREE] = shape_of(method)
    write_atomically(file, json.dumps(config, indent=2, sort_keys=True) + "\n")


def shape_of(method: MethodRecipe) -> dict[str, Any]:
    """What makes the tree, without the row's name."""
    return {key: getattr(method, key) for key in ("tree", "max_depth", "nodes", "branch", "paths")}


def describe(method: MethodRecipe) -> str:
    depth = "" if method.max_depth is None else f" to depth {method.max_depth}"
    size = f" of {method.nodes} nodes" if method.tree == "best_first" else ""
    return f"{method.tree}{size}{depth}"
