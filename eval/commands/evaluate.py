"""The evaluation stage: load target and drafter, ask every question, write tables, pictures and report."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.sources.questions import load_questions, questions_file
from draftsmith.eval.bench.arms import drafter_folder, drafter_folders, load_models, make_arms
from draftsmith.eval.bench.fair_clock import check_complete
from draftsmith.eval.bench.overlap import measure_untimed
from draftsmith.eval.bench.record_log import JsonlLog
from draftsmith.eval.bench.spec_bench import SpecBench, check_settings, write_answers
from draftsmith.eval.report.charts import draw_charts
from draftsmith.eval.report.report import print_table, proof_sentence, write_report
from draftsmith.eval.report.summary import OVERALL, summarize, summarize_timing
from draftsmith.eval.report.theory_charts import draw_theory
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, sha256_of, write_atomically
from draftsmith.recipes.schema import DRAFTER_KIND, EvalRecipe, MethodRecipe, Recipe, TargetRecipe
from draftsmith.train.drafter.card import write_drafter_card

WEIGHTS = "model.safetensors"
TUNED_TREE = "tuned_tree"  # the key of a drafter's config that `draftsmith tune` writes
# Of the recipe's eval section: may differ from what the records were made with.
FREE_KEYS = {"runs", "untimed_questions"}
SETTINGS = "settings.json"  # in the eval folder: what its records were made with
UNTIMED = "untimed.json"
PROOF = "proof.json"  # what `draftsmith prove` leaves in the eval folder


def evaluate(recipe: Recipe) -> list[dict[str, Any]]:
    """Measure what is not measured yet and write everything under `runs/<name>/`. Returns the summary.

    Raises:
        UserError: No trained drafter, bad questions, or records of other settings in the way.
    """
    recipe = with_tuned_trees(recipe)
    folder = RunFolder(recipe)
    for trained in drafter_folders(recipe):
        if not (trained / "config.json").is_file():
            raise UserError(f"no trained drafter in {trained}: run `draftsmith train` with its recipe first")
    questions = load_questions(recipe.eval.questions, recipe.eval.limit_per_category)
    check_settings(folder.eval / SETTINGS, _settings(recipe))
    log = JsonlLog(folder.eval / "records.jsonl")
    check_complete(list(log))
    target, tokenizer, drafters = load_models(recipe)
    choices = recipe.eval
    bench = SpecBench(target, tokenizer, questions, choices.max_new_tokens, recipe.seed, choices.stop, choices.compile)
    try:
        arms = make_arms(recipe, drafters, target, tokenizer, bench.session.max_length_tokens)
        bench.run(arms, log, choices.runs, choices.warmup_questions)
        if choices.untimed_questions and _untimed(recipe) is None:
            figures = measure_untimed(bench, arms, choices.untimed_questions)
            untimed = {"questions": choices.untimed_questions, "arms": figures}
            write_atomically(folder.eval / UNTIMED, json.dumps(untimed, indent=2) + "\n")
    finally:
        bench.session.close()
    notes = {
        "questions": len(bench.questions),
        "left_out": bench.left_out,
        "device": _device_name(target.device),
        "target_change": next((d.target_change for d in drafters.values() if d.target_change), None),
    }
    write_atomically(folder.eval / "notes.json", json.dumps(notes, indent=2) + "\n")
    weights = {str(part): part / WEIGHTS for part in drafters if (part / WEIGHTS).is_file()}
    folder.record("eval", {"questions": questions_file(recipe.eval.questions), **weights})
    return report_again(recipe)


def report_again(recipe: Recipe) -> list[dict[str, Any]]:
    """Write tables, pictures and report from the records alone. Returns the summary."""
    folder = RunFolder(recipe)
    log_file, notes_file = folder.eval / "records.jsonl", folder.eval / "notes.json"
    if not log_file.is_file() or not notes_file.is_file():
        raise UserError(f"{folder.eval} holds no finished measurement: run `draftsmith eval` with this recipe first")
    recipe = _as_measured(recipe)
    records = [record for record in JsonlLog(log_file) if record["run"] < recipe.eval.runs]
    notes = {"target_change": None, **json.loads(notes_file.read_text(encoding="utf-8"))}
    summary = [row | {"target_change": notes["target_change"]} for row in summarize(records)]
    timing = summarize_timing(records, _untimed(recipe))
    write_answers(records, folder.eval / "answers", recipe.name)
    write_atomically(folder.eval / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_atomically(folder.eval / "timing.json", json.dumps(timing, indent=2) + "\n")
    pictures = draw_charts(summary, folder.eval, recipe.name)
    facts = {
        "proof": _proof(recipe),
        "summary": summary,
        "timing": timing,
        "recipe": recipe.model_dump(),
        "provenance": json.loads((folder.root / "provenance.json").read_text(encoding="utf-8"))["eval"],
        "turns_left_out": sum(_turns_left_out(record) for record in records if record["run"] == 0),
        "command": f"draftsmith run {shlex.quote((folder.root / 'recipe.yaml').as_posix())}",
        **notes,
    }
    write_report(folder.root, facts, pictures, draw_theory(timing, folder.eval))
    update_card(recipe)
    print_table(summary)
    return summary


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


def _settings(recipe: Recipe) -> dict[str, Any]:
    """What a measurement depends on."""
    return {
        "eval": recipe.eval.model_dump(exclude=FREE_KEYS),
        "target": recipe.target.model_dump(),
        "seed": recipe.seed,
        "drafter_weights": drafter_weights(recipe),
        "questions_file": sha256_of(questions_file(recipe.eval.questions)),
    }


def _as_measured(recipe: Recipe) -> Recipe:
    """The recipe with the settings that the records were made with: a tree tuned since then is not theirs."""
    recorded = json.loads((RunFolder(recipe).eval / SETTINGS).read_text(encoding="utf-8"))
    free = recipe.eval.model_dump(include=FREE_KEYS)
    return recipe.model_copy(
        update={
            "eval": EvalRecipe.model_validate(recorded["eval"] | free),
            "target": TargetRecipe.model_validate(recorded["target"]),
            "seed": recorded["seed"],
        }
    )


def drafter_weights(recipe: Recipe) -> list[str | None]:
    """SHA-256 of the weights of the drafters that are measured."""
    files = [folder / WEIGHTS for folder in drafter_folders(recipe)]
    return [sha256_of(file) if file.is_file() else None for file in files]


def update_card(recipe: Recipe) -> None:
    """Write the model card of the run's own drafter again, with what was measured and proved of its weights."""
    if (RunFolder(recipe).drafter / "config.json").is_file():
        write_drafter_card(recipe, _card_figures(recipe), proof_sentence(_proof(recipe)))


def _card_figures(recipe: Recipe) -> dict[str, Any] | None:
    folder = RunFolder(recipe)
    if not (folder.eval / "summary.json").is_file():
        return None
    measured = _as_measured(recipe)
    settings = json.loads((folder.eval / SETTINGS).read_text(encoding="utf-8"))
    if settings["drafter_weights"] != drafter_weights(measured):
        return None
    own = {m.name for m in measured.eval.methods if m.kind == DRAFTER_KIND and m.drafter is None}
    summary = json.loads((folder.eval / "summary.json").read_text(encoding="utf-8"))
    notes = json.loads((folder.eval / "notes.json").read_text(encoding="utf-8"))
    machine = json.loads((folder.root / "provenance.json").read_text(encoding="utf-8"))["eval"]["machine"]
    rows = [row for row in summary if row["category"] == OVERALL and row["method"] in own and row["tau"] is not None]
    if not rows:
        return None
    return {
        "rows": rows,
        "questions": f"{notes['questions']} questions of `{questions_file(measured.eval.questions).name}`",
        "machine": notes["device"] or f"{machine['processor']}, {machine['cpu_count']} CPUs",
    }


def _untimed(recipe: Recipe) -> dict[str, Any] | None:
    """By arm, what was measured off the clock with as many questions as the recipe asks for."""
    file = RunFolder(recipe).eval / UNTIMED
    if not file.is_file():
        return None
    untimed = json.loads(file.read_text(encoding="utf-8"))
    return untimed["arms"] if untimed["questions"] == recipe.eval.untimed_questions else None


def _proof(recipe: Recipe) -> dict[str, Any] | None:
    """What `draftsmith prove` found out about these very drafters, if it was run."""
    file = RunFolder(recipe).eval / PROOF
    if not file.is_file():
        return None
    proof = json.loads(file.read_text(encoding="utf-8"))
    return proof if proof["drafter_weights"] == drafter_weights(recipe) else None


def _turns_left_out(record: dict[str, Any]) -> int:
    return max(answer["turns_left_out"] for answer in record["answers"].values())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
