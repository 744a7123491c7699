"""What `eval` and `prove` found, on the model card of the run's own drafter."""

from typing import Any

from draftsmith.data.sources.questions import questions_file
from draftsmith.eval.commands.measurement import (
    NOTES,
    as_measured,
    drafter_weights,
    measured_records,
    measured_summary,
    recorded_notes,
    recorded_settings,
)
from draftsmith.eval.commands.proof import recorded_proof
from draftsmith.eval.report.report import proof_sentence
from draftsmith.eval.report.summary import OVERALL
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DRAFTER_KIND, Recipe
from draftsmith.train.drafter.card import write_drafter_card


def update_card(recipe: Recipe) -> None:
    """Write the model card of the run's own drafter again, with what was measured and proved of its weights."""
    if (RunFolder(recipe).drafter / "config.json").is_file():
        write_drafter_card(recipe, _card_figures(recipe), proof_sentence(recorded_proof(recipe)))


def _card_figures(recipe: Recipe) -> dict[str, Any] | None:
    folder = RunFolder(recipe)
    if not (folder.eval / NOTES).is_file():
        return None
    measured = as_measured(recipe)
    if recorded_settings(recipe).drafter_weights != drafter_weights(measured):
        return None
    own = {m.name for m in measured.eval.methods if m.kind == DRAFTER_KIND and m.drafter is None}
    notes = recorded_notes(measured)
    machine = folder.provenance("eval").machine
    rows = [
        row
        for row in measured_summary(measured_records(measured), notes)
        if row["category"] == OVERALL and row["method"] in own and row["tau"] is not None
    ]
    if not rows:
        return None
    return {
        "rows": rows,
        "questions": f"{notes.questions} questions of `{questions_file(measured.eval.questions).name}`",
        "machine": notes.device or f"{machine.processor}, {machine.cpu_count} CPUs",
    }
