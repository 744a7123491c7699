"""The evaluation stage: load target and drafter, answer every question, write tables and report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftsmith.cli import artifacts
from draftsmith.cli.console import console, print_table
from draftsmith.data.card.card import CARD_JSON, DataCard
from draftsmith.data.sources.question_sets import questions_files
from draftsmith.data.sources.questions import load_questions
from draftsmith.errors import masked
from draftsmith.eval.bench.divergence import find_divergences
from draftsmith.eval.bench.measured_methods import drafter_folders, load_models, measured_methods
from draftsmith.eval.bench.records import RecordLog
from draftsmith.eval.bench.spec_bench import SpecBench, write_answers
from draftsmith.eval.engines.load_test import load_engine_measurements
from draftsmith.eval.report import sentences
from draftsmith.eval.report.page import write_report
from draftsmith.eval.report.summary import Row, baseline_speeds, evaluation_figures
from draftsmith.eval.report.text import drafter_name
from draftsmith.files import read_json, write_json
from draftsmith.models.base.registry import no_drafter
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder, check_settings, with_run_lock
from draftsmith.recipes.schema import DRAFTER_KIND, Recipe
from draftsmith.results import write_result
from draftsmith.train.drafter.report import TrainReport

DISTIL_AGAIN = "delete it and run `draftsmith distill` again"


@with_run_lock("eval")
def evaluate(recipe: Recipe, command: str | None = None) -> list[dict[str, Any]]:
    """Measure all questions that have no record yet and write the results under `runs/<name>/`. Returns the summary.

    Args:
        command: Command that repeats the measurement, for the report; default: `draftsmith run` with the run's recipe.

    Raises:
        UserError: There is no trained drafter, the questions are invalid, or the run folder has records of other
            settings.
    """
    recipe = artifacts.with_tuned_trees(recipe)
    folder = RunFolder(recipe)
    for trained in drafter_folders(recipe):
        if not (trained / "config.json").is_file():
            raise no_drafter(trained)
    choices = recipe.eval
    questions = load_questions(choices.question_sets, choices.limit_per_category, choices.limit_per_task)
    settings = artifacts.measurement_settings(recipe)
    check_settings(folder.eval / artifacts.SETTINGS, settings, "measure again")
    write_json(folder.eval / artifacts.SETTINGS, settings)
    log = RecordLog(folder.eval / artifacts.RECORDS)
    # Damaged files that the measurement or the report would read are reported before anything is measured.
    list(log)
    artifacts.recorded_proof(recipe)
    load_engine_measurements(recipe)
    artifacts.recorded_divergences(recipe)
    weights = {
        str(part): part / artifacts.WEIGHTS for part in drafter_folders(recipe) if (part / artifacts.WEIGHTS).is_file()
    }
    files = {f"questions {name}": file for name, file in questions_files(choices.question_sets).items()}
    folder.record("eval", {**files, **weights})
    target, tokenizer, drafters = load_models(recipe)
    bench = SpecBench(target, tokenizer, questions, choices.max_new_tokens, recipe.seed, choices.stop, choices.compile)
    try:
        methods = measured_methods(recipe, drafters, target, tokenizer, bench.session.max_length_tokens)
        bench.run(methods, log, choices.runs, choices.warmup_questions)
        parted = find_divergences(bench, log, artifacts.recorded_divergences(recipe))
        write_json(folder.eval / artifacts.DIVERGENCES, {"answers": list(map(asdict, parted))})
    finally:
        bench.session.close()
    kinds = [drafter.config.kind for drafter in drafters.values()]
    notes = {
        "questions": len(bench.questions),
        "left_out": bench.left_out,
        "tasks_left_out": bench.tasks_left_out,
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "",
        "target_change": next((d.target_change for d in drafters.values() if hasattr(d, "target_change")), None),
        "drafter_kinds": list(dict.fromkeys(kinds)),
        **({} if command is None else {"command": masked(command)}),
    }
    write_json(folder.eval / artifacts.NOTES, notes)
    return report_again(recipe)


def report_again(recipe: Recipe, show: bool = True) -> list[dict[str, Any]]:
    """Write tables and report from the stored records, and print the table if `show`. Returns the summary."""
    measured, folder = artifacts.recorded_measurement(recipe), RunFolder(recipe)
    recipe, records, summary = measured.recipe, measured.records, measured.summary
    baseline = baseline_speeds(records, summary)
    write_answers(records, folder.eval / "answers", recipe.name)
    first_run = (record.answers.values() for record in records if record.run == 0)
    proof, provenance = artifacts.recorded_proof(recipe), folder.provenance("eval")
    figures = evaluation_figures(recipe, summary, measured.notes.questions, proof, baseline)
    write_result(folder.eval / "result.json", figures, measured.notes.command, provenance)
    named = [method.drafter for method in recipe.eval.methods if method.kind == DRAFTER_KIND]
    drafters = (folder.drafter if place is None else Path(place) for place in named)
    trained = (place for place in dict.fromkeys(drafters) if (place / TRAINING_FILE).is_file())
    card = folder.data / CARD_JSON
    facts = {
        "proof": proof,
        "summary": summary,
        "baseline": baseline,
        "recipe": recipe,
        "provenance": provenance,
        "turns_left_out": sum(max(answer.turns_left_out for answer in answers) for answers in first_run),
        "served": load_engine_measurements(recipe),
        "records": records,
        "inputs_sha256": provenance.inputs_sha256,
        "trained": {drafter_name(place.as_posix()): TrainReport.read(place) for place in trained},
        "data_card": read_json(card, DataCard, DISTIL_AGAIN) if card.is_file() else None,
        **asdict(measured.notes),
    }
    write_report(folder.root, facts)
    artifacts.update_card(recipe)
    if show:
        show_table(summary, baseline, recipe.target.model == sentences.EMBEDDED)
    return summary


def show_table(summary: list[Row], baseline: list[Row], is_embedded: bool) -> None:
    """Print the result table and sentences that explain it; `is_embedded` selects those of the embedded target."""
    title, headings, cells = sentences.result_table(summary)
    print_table(headings, cells, title)
    # The embedded target's weights lie in the processor's cache, so that the memory's speed says nothing.
    why = [f"{sentences.EMBEDDED_MEANING}."] if is_embedded else sentences.baseline_sentences(baseline)
    for sentence in (f"{sentences.WHY}.", *why):
        console.print(sentence, soft_wrap=False)
    warnings = {row["target_change"] for row in summary if row.get("target_change")}
    for sentence in (*([] if all(row["lossless"] for row in summary) else [sentences.LENIENCE_WARNING]), *warnings):
        console.print(sentence, style="bold", soft_wrap=False)
