"""The evaluation stage: load target and drafter, ask every question, write tables, pictures and report."""

from __future__ import annotations

import json
import shlex
from typing import Any

import torch

from draftsmith.data.jsonl_log import JsonlLog
from draftsmith.eval.charts import draw_charts
from draftsmith.eval.methods import Autoregressive, DrafterMethod
from draftsmith.eval.question_list import load_questions, questions_file
from draftsmith.eval.report import print_table, write_report
from draftsmith.eval.sampling import Sampling
from draftsmith.eval.spec_bench import Arm, SpecBench, check_settings, write_answers
from draftsmith.eval.summary import summarize, summarize_timing
from draftsmith.eval.tree_builders import tree_builder
from draftsmith.models.drafter import Drafter, load_drafter
from draftsmith.models.target import load_target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, sha256_of, write_atomically
from draftsmith.recipes.schema import Recipe

WEIGHTS = "model.safetensors"


def evaluate(recipe: Recipe) -> list[dict[str, Any]]:
    """Measure what is not measured yet and write everything under `runs/<name>/`. Returns the summary.

    Raises:
        UserError: No trained drafter, bad questions, or records of other settings in the way.
    """
    folder = RunFolder(recipe)
    if not (folder.drafter / "config.json").is_file():
        raise UserError(f"no trained drafter in {folder.drafter}: run `draftsmith train` with this recipe first")
    questions = load_questions(recipe.eval.questions, recipe.eval.limit_per_category)
    check_settings(folder.eval / "settings.json", _settings(recipe, folder))
    target, tokenizer = load_target(recipe.target)
    drafter = load_drafter(folder.drafter, target)
    wanted, layers = recipe.eval.max_new_tokens, drafter.feature_layers
    bench = SpecBench(target, tokenizer, [], questions, wanted, recipe.seed, layers)
    bench.arms = make_arms(recipe, drafter, bench.session.max_length_tokens, target.device)
    try:
        bench.run(JsonlLog(folder.eval / "records.jsonl"), recipe.eval.runs, recipe.eval.warmup_questions)
    finally:
        bench.session.close()
    notes = {"questions": len(bench.questions), "left_out": bench.left_out, "device": _device_name(target.device)}
    write_atomically(folder.eval / "notes.json", json.dumps(notes, indent=2) + "\n")
    weights = {"drafter": folder.drafter / WEIGHTS} if (folder.drafter / WEIGHTS).is_file() else {}
    folder.record("eval", {"questions": questions_file(recipe.eval.questions), **weights})
    return report_again(recipe)


def report_again(recipe: Recipe) -> list[dict[str, Any]]:
    """Write tables, pictures and report from the records alone. Returns the summary."""
    folder = RunFolder(recipe)
    log_file, notes_file = folder.eval / "records.jsonl", folder.eval / "notes.json"
    if not log_file.is_file() or not notes_file.is_file():
        raise UserError(f"{folder.eval} holds no finished measurement: run `draftsmith eval` with this recipe first")
    records = [record for record in JsonlLog(log_file) if record["run"] < recipe.eval.runs]
    summary, timing = summarize(records), summarize_timing(records)
    write_answers(records, folder.eval / "answers", recipe.name)
    write_atomically(folder.eval / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_atomically(folder.eval / "timing.json", json.dumps(timing, indent=2) + "\n")
    pictures = draw_charts(summary, folder.eval, recipe.name)
    facts = {
        "summary": summary,
        "timing": timing,
        "recipe": recipe.model_dump(),
        "provenance": json.loads((folder.root / "provenance.json").read_text(encoding="utf-8"))["eval"],
        "turns_left_out": sum(_turns_left_out(record) for record in records if record["run"] == 0),
        "command": f"draftsmith run {shlex.quote((folder.root / 'recipe.yaml').as_posix())}",
        **json.loads(notes_file.read_text(encoding="utf-8")),
    }
    write_report(folder.root, facts, pictures)
    print_table(summary)
    return summary


def make_arms(recipe: Recipe, drafter: Drafter, max_length_tokens: int, device: torch.device) -> list[Arm]:
    """The baseline and every method of the recipe, at every temperature. The drafter's memory is shared by all."""
    decoder = drafter.decoder(max_length_tokens)
    arms = []
    for temperature in recipe.eval.temperatures:
        sampling = Sampling(temperature, recipe.eval.top_k, recipe.eval.top_p)
        arms.append(Arm(Autoregressive(), sampling, torch.Generator(device)))
        for method in recipe.eval.methods:
            generator = torch.Generator(device)
            drafting = DrafterMethod(method.name, decoder, tree_builder(method, decoder), sampling, generator)
            arms.append(Arm(drafting, sampling, generator))
    keys = [arm.key for arm in arms]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"eval.methods and eval.temperatures give {key} twice: each method needs a name of its own")
    return arms


def _settings(recipe: Recipe, folder: RunFolder) -> dict[str, Any]:
    """What a measurement depends on. More runs may be added later, so their number is not part of it."""
    weights = folder.drafter / WEIGHTS
    return {
        "eval": recipe.eval.model_dump(exclude={"runs"}),
        "target": recipe.target.model_dump(),
        "seed": recipe.seed,
        "drafter_weights": sha256_of(weights) if weights.is_file() else None,
        "questions_file": sha256_of(questions_file(recipe.eval.questions)),
    }


def _turns_left_out(record: dict[str, Any]) -> int:
    return max(answer["turns_left_out"] for answer in record["answers"].values())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
