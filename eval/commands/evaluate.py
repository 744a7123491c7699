"""The evaluation stage: load target and drafter, ask every question, write tables, pictures and report."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.data.sources.questions import load_questions, questions_file
from draftsmith.eval.bench.fair_clock import check_complete
from draftsmith.eval.bench.overlap import measure_untimed
from draftsmith.eval.bench.record_log import JsonlLog
from draftsmith.eval.bench.spec_bench import Arm, SpecBench, check_settings, write_answers
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.methods.registry import MethodSetting, make_method
from draftsmith.eval.report.charts import draw_charts
from draftsmith.eval.report.report import print_table, proof_sentence, write_report
from draftsmith.eval.report.summary import OVERALL, summarize, summarize_timing
from draftsmith.eval.report.theory_charts import draw_theory
from draftsmith.eval.trees.builders import tree_builder
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.models.base.drafter import Compilable, Drafter, load_drafter
from draftsmith.models.target.loading import load_target
from draftsmith.models.target.packed_head import pack_heads
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, sha256_of, write_atomically
from draftsmith.recipes.schema import DRAFTER_KIND, EvalRecipe, MethodRecipe, Recipe, TargetRecipe
from draftsmith.train.drafter.card import write_card

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
    for drafter_folder in _drafter_folders(recipe):
        if not (drafter_folder / "config.json").is_file():
            raise UserError(f"no trained drafter in {drafter_folder}: run `draftsmith train` with its recipe first")
    questions = load_questions(recipe.eval.questions, recipe.eval.limit_per_category)
    check_settings(folder.eval / SETTINGS, _settings(recipe))
    log = JsonlLog(folder.eval / "records.jsonl")
    check_complete(list(log))
    target, tokenizer, drafters = load_models(recipe)
    choices = recipe.eval
    bench = SpecBench(
        target, tokenizer, [], questions, choices.max_new_tokens, recipe.seed, choices.stop, choices.compile
    )
    bench.arms = make_arms(recipe, drafters, target, tokenizer, bench.session.max_length_tokens)
    try:
        bench.run(log, recipe.eval.runs, recipe.eval.warmup_questions)
        if recipe.eval.untimed_questions and _untimed(recipe) is None:
            arms = measure_untimed(bench, recipe.eval.untimed_questions)
            untimed = {"questions": recipe.eval.untimed_questions, "arms": arms}
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


def load_models(recipe: Recipe) -> tuple[PreTrainedModel, Any, dict[Path, Drafter]]:
    """The target, its tokenizer and the recipe's trained drafters by folder, ready to decode.

    Raises:
        UserError: One of them cannot be loaded.
    """
    target, tokenizer = load_target(recipe.target)
    vocab_size = target.config.get_text_config().vocab_size
    pack_heads(target, vocab_size)  # before drafters borrow the head
    drafters = load_drafters(recipe, target)
    for drafter in drafters.values():
        pack_heads(drafter, vocab_size)
    return target, tokenizer, drafters


def load_drafters(recipe: Recipe, target: PreTrainedModel) -> dict[Path, Drafter]:
    """The drafters that the recipe's methods use, by folder.

    Raises:
        UserError: One of several drafters changes the target, which the others were not made for.
    """
    drafters = {folder: load_drafter(folder, target) for folder in _drafter_folders(recipe)}
    for folder, drafter in drafters.items():
        if drafter.target_change and len(drafters) > 1:
            raise UserError(f"{folder} changes the target: measure it in a run of its own, not beside other drafters")
    return drafters


def make_arms(
    recipe: Recipe, drafters: dict[Path, Drafter], target: PreTrainedModel, tokenizer: Any, max_length_tokens: int
) -> list[Arm]:
    """The baseline and every method of the recipe, at every temperature. Methods of one drafter share its memory.

    Raises:
        UserError: Two methods have one name, or a method's kind or options are wrong.
    """
    decoders = {folder: drafter.decoder(max_length_tokens) for folder, drafter in drafters.items()}
    for decoder in decoders.values():
        if recipe.eval.compile and isinstance(decoder, Compilable):
            decoder.compile()
    arms = []
    for temperature in recipe.eval.temperatures:
        sampling = Sampling(temperature, recipe.eval.top_k, recipe.eval.top_p)
        arms.append(Arm(Autoregressive(), sampling, torch.Generator(target.device)))
        for method in recipe.eval.methods:
            generator = torch.Generator(target.device)
            if method.kind != DRAFTER_KIND:
                tokens_folder = _drafter_folder(recipe, method).parent / "data" / "tokens"
                setting = MethodSetting(
                    method, target, tokenizer, tokens_folder, max_length_tokens, sampling, generator
                )
                arms.append(Arm(make_method(setting), sampling, generator, lenience=method.lenience))
                continue
            folder = _drafter_folder(recipe, method)
            decoder = decoders[folder]
            drafting = DrafterMethod(method.name, decoder, tree_builder(method, decoder), sampling, generator)
            arms.append(Arm(drafting, sampling, generator, drafters[folder].feature_layers, method.lenience))
    keys = [arm.key for arm in arms]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"eval.methods and eval.temperatures give {key} twice: each method needs a name of its own")
    return arms


def with_tuned_trees(recipe: Recipe) -> Recipe:
    """The recipe with every `tree: tuned` replaced by the tree that its drafter was tuned to."""
    methods = [resolve_tuned(method, _drafter_folder(recipe, method)) for method in recipe.eval.methods]
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": methods})})


def resolve_tuned(method: MethodRecipe, drafter_folder: Path) -> MethodRecipe:
    """The tree in the drafter's config; best-first where it was never tuned."""
    if method.tree != "tuned":
        return method
    file = drafter_folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return method.model_copy(update=config.get(TUNED_TREE, {"tree": "best_first"}))


def _drafter_folder(recipe: Recipe, method: MethodRecipe) -> Path:
    """Where the method's drafter lies: the run's own, unless it names another."""
    return RunFolder(recipe).drafter if method.drafter is None else Path(method.drafter).expanduser()


def _drafter_folders(recipe: Recipe) -> list[Path]:
    """Each once, in the order of the methods."""
    drafted = (method for method in recipe.eval.methods if method.kind == DRAFTER_KIND)
    return list(dict.fromkeys(_drafter_folder(recipe, method) for method in drafted))


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
    files = [folder / WEIGHTS for folder in _drafter_folders(recipe)]
    return [sha256_of(file) if file.is_file() else None for file in files]


def update_card(recipe: Recipe) -> None:
    """Write the model card of the run's own drafter again, with what was measured and proved of its weights."""
    if (RunFolder(recipe).drafter / "config.json").is_file():
        write_card(recipe, _card_figures(recipe), proof_sentence(_proof(recipe)))


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
