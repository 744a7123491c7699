"""What is stored with a drafter after its training: the tree that `tune` found, and figures on its model card.

The tree is in the drafter's config, and `tree: tuned` in a recipe stands for it. The card tells what `eval` and `prove`
found of the weights beside it.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from draftsmith.data.sources.questions import questions_file
from draftsmith.eval.artifacts.measurement import (
    NOTES,
    as_measured,
    drafter_weights,
    measured_records,
    measured_summary,
    recorded_divergences,
    recorded_notes,
    recorded_settings,
)
from draftsmith.eval.artifacts.proof import recorded_proof
from draftsmith.eval.bench.measured_methods import drafter_folder
from draftsmith.eval.report.report import proof_sentence
from draftsmith.eval.report.summary import OVERALL, summarize_timing
from draftsmith.models.base.registry import drafter_config
from draftsmith.recipes.errors import UserError, masked
from draftsmith.recipes.results import portable
from draftsmith.recipes.run_folder import RunFolder, write_atomically
from draftsmith.recipes.schema import DRAFTER_KIND, MethodRecipe, Recipe
from draftsmith.train.drafter.card import Publication, write_drafter_card

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
    """Write the tree into the drafter's config, which goes wherever its weights go."""
    config = {**drafter_config(drafter_folder), TUNED_TREE: shape_of(method)}
    write_atomically(drafter_folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def shape_of(method: MethodRecipe) -> dict[str, Any]:
    """What makes the tree, without the row's name."""
    return {key: getattr(method, key) for key in ("tree", "max_depth", "nodes", "branch", "paths", "lookup")}


def describe(method: MethodRecipe) -> str:
    depth = "" if method.max_depth is None else f" to depth {method.max_depth}"
    size = f" of {method.nodes} nodes" if method.best_first else ""
    return f"{method.tree}{size}{depth}{' with lookups' if method.lookup else ''}"


def update_card(recipe: Recipe, publication: Publication | None = None) -> None:
    """Write the model card of the run's own drafter again, with what was measured and proved of its weights."""
    if (RunFolder(recipe).drafter / "config.json").is_file():
        write_drafter_card(recipe, card_figures(recipe), proof_sentence(recorded_proof(recipe)), publication)


def card_figures(recipe: Recipe) -> dict[str, Any] | None:
    """Collect the figures for `write_drafter_card`; None without a measurement of these weights."""
    folder = RunFolder(recipe)
    if not (folder.eval / NOTES).is_file():
        return None
    measured = as_measured(recipe)
    if recorded_settings(recipe).drafter_weights != drafter_weights(measured):
        return None
    own = {m.name for m in measured.eval.methods if m.kind == DRAFTER_KIND and m.drafter is None}
    notes = recorded_notes(measured)
    machine = folder.provenance("eval").machine
    recipe_file = shlex.quote((folder.root / "recipe.yaml").as_posix())  # which is beside the card on the Hub
    records = measured_records(measured)
    timed = {(row["method"], row["temperature"]): row for row in summarize_timing(records)}
    rows = [
        row | {"acceptance_by_depth": timed[row["method"], row["temperature"]]["acceptance_by_depth"]}
        for row in measured_summary(records, notes, recorded_divergences(measured))
        if row["category"] == OVERALL and row["method"] in own and row["tau"] is not None
    ]
    if not rows:
        return None
    return {
        "rows": rows,
        "questions": f"{notes.questions} questions of `{questions_file(measured.eval.questions).name}`",
        "dataset": questions_file(measured.eval.questions).stem,
        "command": portable(masked(str(notes.command).replace(recipe_file, "recipe.yaml"))),
        "machine": notes.device or f"{machine.processor}, {machine.cpu_count} CPUs",
    }
