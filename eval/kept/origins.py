"""Where what was measured comes from, for its report: the drafters' training logs, and the card of the data."""

from __future__ import annotations

from pathlib import Path

from draftsmith.data.card.card import CARD_JSON, DataCard
from draftsmith.eval.report.page.measured import drafter_name
from draftsmith.models.base.registry import TRAINING_FILE, Training, read_training
from draftsmith.recipes.run_folder import RunFolder, read_json
from draftsmith.recipes.schema import DRAFTER_KIND, Recipe


def recorded_trainings(recipe: Recipe) -> dict[str, Training]:
    """Of the measured drafters that lie here with their log, by the name of their run.

    Raises:
        UserError: A log is damaged.
    """
    own = RunFolder(recipe).drafter
    drafted = [method for method in recipe.eval.methods if method.kind == DRAFTER_KIND]
    folders = [own if method.drafter is None else Path(method.drafter).expanduser() for method in drafted]
    found = (folder for folder in dict.fromkeys(folders) if (folder / TRAINING_FILE).is_file())
    return {drafter_name(folder.as_posix()): read_training(folder) for folder in found}


def recorded_data_card(recipe: Recipe) -> DataCard | None:
    """`data/card.json`; None of data that has none.

    Raises:
        UserError: It is damaged.
    """
    file = RunFolder(recipe).data / CARD_JSON
    if not file.is_file():
        return None
    return read_json(file, DataCard, "delete it and run `draftsmith distill` again")
