"""What `eval` and `prove` found, on the model card of the run's own drafter; and that card in what `push` sends."""

import shlex
from typing import Any

from draftsmith.data.sources.questions import questions_file
from draftsmith.eval.kept.measurement import (
    NOTES,
    as_measured,
    drafter_weights,
    measured_records,
    measured_summary,
    recorded_divergences,
    recorded_notes,
    recorded_settings,
)
from draftsmith.eval.kept.proof import recorded_proof
from draftsmith.eval.report.report import proof_sentence
from draftsmith.eval.report.summary import OVERALL, summarize_timing
from draftsmith.recipes.masking import masked
from draftsmith.recipes.results import portable
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DRAFTER_KIND, Recipe
from draftsmith.train.drafter.card import Publication, write_drafter_card


def update_card(recipe: Recipe, publication: Publication | None = None) -> None:
    """Write the model card of the run's own drafter again, with what was measured and proved of its weights."""
    if (RunFolder(recipe).drafter / "config.json").is_file():
        write_drafter_card(recipe, card_figures(recipe), proof_sentence(recorded_proof(recipe)), publication)


def card_figures(recipe: Recipe) -> dict[str, Any] | None:
    """For `write_drafter_card`; None without a measurement of these weights."""
    folder = RunFolder(recipe)
    if not (folder.eval / NOTES).is_file():
        return None
    measured = as_measured(recipe)
    if recorded_settings(recipe).drafter_weights != drafter_weights(measured):
        return None
    own = {m.name for m in measured.eval.methods if m.kind == DRAFTER_KIND and m.drafter is None}
    notes = recorded_notes(measured)
    machine = folder.provenance("eval").machine
    recipe_file = shlex.quote((folder.root / "recipe.yaml").as_posix())  # which lies beside the card on the Hub
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
