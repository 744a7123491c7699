"""What is in `runs/<name>/eval/`: records, what they were made with, what was measured beside them, and its origins."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from draftsmith.data.card.card import CARD_JSON, DataCard
from draftsmith.data.sources.questions import questions_file
from draftsmith.eval.bench.divergence import RecordedDivergence
from draftsmith.eval.bench.measured_methods import compiles, drafter_folders
from draftsmith.eval.bench.records import QuestionRecord, RecordLog
from draftsmith.eval.bench.traced import TracedAnswer
from draftsmith.eval.methods.registry import method_of
from draftsmith.eval.report.summary import summarize
from draftsmith.eval.report.text import drafter_name
from draftsmith.models.base.registry import TRAINING_FILE, Training, read_training
from draftsmith.models.weights import sampled_hash
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, read_json, sha256_of
from draftsmith.recipes.schema import DRAFTER_KIND, EvalRecipe, MethodRecipe, Recipe, TargetRecipe

WEIGHTS = "model.safetensors"
SETTINGS = "settings.json"
RECORDS = "records.jsonl"
NOTES = "notes.json"
UNTIMED = "untimed.json"
DIVERGENCES = "divergences.json"
TRACED = "traced.json"
# Of the recipe's eval section: may differ from what the records were made with.
FREE_KEYS = {"runs", "untimed_questions"}
EVAL_AGAIN = "delete it and run `draftsmith eval` again"


@dataclass
class Measurement:
    """`settings.json`: what the records were made with."""

    eval: EvalRecipe
    target: TargetRecipe
    seed: int
    drafter_weights: list[str | None]


@dataclass
class Notes:
    """`notes.json`: what the last evaluation noted beside its records."""

    questions: int
    left_out: int
    device: str
    target_change: str | None = None
    drafter_kinds: list[str] | None = None
    command: str | None = None


@dataclass
class Untimed:
    """`untimed.json`: by `method@temperature`, see `OverlapMeter.figures`."""

    questions: int
    arms: dict[str, dict[str, FiniteFloat | None]]


def measurement_settings(recipe: Recipe) -> dict[str, Any]:
    """What a measurement depends on.

    Options of methods are written out, so that a default that changes is noticed, and so are the weights in folders
    which they name.

    Raises:
        UserError: A method's kind or options are wrong.
    """
    methods: list[MethodRecipe] = []
    weights: dict[str, str] = {}
    for method in recipe.eval.methods:
        if method.kind != DRAFTER_KIND:
            options = method_of(method)[1].model_dump()
            method = method.model_copy(update={"options": options})
            values = (option if isinstance(option, list) else [option] for option in options.values())
            folders = (Path(each).expanduser() for value in values for each in value if isinstance(each, str))
            weights |= {str(each): sampled_hash(each.glob("*.safetensors")) for each in folders if each.is_dir()}
        methods.append(method)
    evaluation = recipe.eval.model_copy(update={"methods": methods, "compile": compiles(recipe)})
    return {
        "eval": evaluation.model_dump(exclude=FREE_KEYS),
        "method_weights": weights,
        "target": recipe.target.model_dump(),
        "seed": recipe.seed,
        "drafter_weights": drafter_weights(recipe),
        "questions_file": sha256_of(questions_file(recipe.eval.questions)),
    }


def recorded_settings(recipe: Recipe) -> Measurement:
    """Read what the records were made with.

    Raises:
        UserError: It is damaged, or what no recipe may say any more.
    """
    folder = RunFolder(recipe).eval
    return read_json(folder / SETTINGS, Measurement, f"delete the folder {folder} to measure again")


def as_measured(recipe: Recipe) -> Recipe:
    """The recipe with the settings that the records were made with: a tree tuned since then is not theirs."""
    recorded = recorded_settings(recipe)
    measured = recorded.eval.model_copy(update={key: getattr(recipe.eval, key) for key in FREE_KEYS})
    return recipe.model_copy(update={"eval": measured, "target": recorded.target, "seed": recorded.seed})


def recorded_notes(recipe: Recipe) -> Notes:
    """The notes, with what earlier versions did not note."""
    folder = RunFolder(recipe)
    notes = read_json(folder.eval / NOTES, Notes, EVAL_AGAIN)
    notes.drafter_kinds = notes.drafter_kinds or [recipe.drafter.kind]
    notes.command = notes.command or f"draftsmith run {shlex.quote((folder.root / 'recipe.yaml').as_posix())}"
    return notes


def measured_records(recipe: Recipe) -> list[QuestionRecord]:
    """The records of the runs that the recipe asks for.

    Raises:
        UserError: Nothing was measured to its end yet.
    """
    folder = RunFolder(recipe).eval
    if not (folder / RECORDS).is_file() or not (folder / NOTES).is_file():
        raise UserError(f"{folder} holds no finished measurement: run `draftsmith eval` with this recipe first")
    return [record for record in RecordLog(folder / RECORDS) if record.run < recipe.eval.runs]


def measured_summary(
    records: list[QuestionRecord], notes: Notes, divergences: Iterable[RecordedDivergence]
) -> list[dict[str, Any]]:
    """The summary, always from the records: `summary.json` is for others to read."""
    return [row | {"target_change": notes.target_change} for row in summarize(records, divergences)]


def recorded_divergences(recipe: Recipe) -> list[RecordedDivergence]:
    """What is known of greedy answers that differ from the target's."""
    file = RunFolder(recipe).eval / DIVERGENCES
    return read_json(file, list[RecordedDivergence], EVAL_AGAIN, "answers") if file.is_file() else []


def recorded_traced(recipe: Recipe) -> list[TracedAnswer] | None:
    """A few answers round by round; None: of a version that traced none."""
    file = RunFolder(recipe).eval / TRACED
    return read_json(file, list[TracedAnswer], EVAL_AGAIN, "answers") if file.is_file() else None


def drafter_weights(recipe: Recipe) -> list[str | None]:
    """Hash the weights of the drafters that are measured (SHA-256)."""
    files = [folder / WEIGHTS for folder in drafter_folders(recipe)]
    return [sha256_of(file) if file.is_file() else None for file in files]


def untimed_figures(recipe: Recipe) -> dict[str, Any] | None:
    """Read what was measured off the clock, by `method@temperature`, with as many questions as the recipe asks for."""
    file = RunFolder(recipe).eval / UNTIMED
    untimed = read_json(file, Untimed, EVAL_AGAIN) if file.is_file() else None
    return untimed.arms if untimed is not None and untimed.questions == recipe.eval.untimed_questions else None


def recorded_trainings(recipe: Recipe) -> dict[str, Training]:
    """The training logs of the measured drafters that are here with one, by the name of their run.

    Raises:
        UserError: A log is damaged.
    """
    own = RunFolder(recipe).drafter
    drafted = [method for method in recipe.eval.methods if method.kind == DRAFTER_KIND]
    folders = [own if method.drafter is None else Path(method.drafter).expanduser() for method in drafted]
    found = (folder for folder in dict.fromkeys(folders) if (folder / TRAINING_FILE).is_file())
    return {drafter_name(folder.as_posix()): read_training(folder) for folder in found}


def recorded_data_card(recipe: Recipe) -> DataCard | None:
    """Read `data/card.json`; None for data that has none.

    Raises:
        UserError: It is damaged.
    """
    file = RunFolder(recipe).data / CARD_JSON
    if not file.is_file():
        return None
    return read_json(file, DataCard, "delete it and run `draftsmith distill` again")
