"""The files that commands store in a run's folder for other commands, and how these read them back.

`eval/` holds the records and the settings that they were made with, the other measurements, and the proof. The
drafter's folder holds the tree that `tune` found (in its config; `tree: tuned` in a recipe stands for it) and the model
card, which reports the results of `eval` and `prove` for the weights in that folder.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.sources.question_sets import questions_files, set_name
from draftsmith.errors import UserError, masked
from draftsmith.eval.bench.divergence import Divergence, RecordedDivergence
from draftsmith.eval.bench.measured_methods import compiles, drafter_folder, drafter_folders
from draftsmith.eval.bench.records import QuestionRecord, RecordLog
from draftsmith.eval.methods.registry import load_method_class
from draftsmith.eval.report.sentences import proof_sentence
from draftsmith.eval.report.summary import OVERALL, summarize
from draftsmith.files import file_sha256, read_json, write_atomically
from draftsmith.models.base.registry import drafter_config
from draftsmith.models.weights import sampled_hash
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DRAFTER_KIND, EvalRecipe, MethodConfig, Recipe, TargetRecipe
from draftsmith.results import portable
from draftsmith.train.drafter.model_card import Publication, write_drafter_card

WEIGHTS = "model.safetensors"
SETTINGS, RECORDS, NOTES, PROOF = "settings.json", "records.jsonl", "notes.json", "proof.json"
DIVERGENCES = "divergences.json"
EVAL_AGAIN = "delete it and run `draftsmith eval` again"
TUNED_TREE = "tuned_tree"  # the key of the drafter's config
SIGNIFICANCE = 1e-3  # of all distribution tests together
ENUMERATION_TOLERANCE = 1e-9


@dataclass
class Settings:
    """Content of `settings.json`: the settings that the records were made with."""

    eval: EvalRecipe
    target: TargetRecipe
    seed: int
    drafter_weights: list[str | None]


@dataclass
class Notes:
    """Content of `notes.json`: facts about the last evaluation that its records do not hold."""

    questions: int
    left_out: int
    device: str
    drafter_kinds: list[str]
    target_change: str | None = None
    command: str | None = None
    tasks_left_out: list[str] = field(default_factory=list)


@dataclass
class Measurement:
    """A finished measurement of the runs that a recipe asks for, with figures computed from its records.

    recipe: the recipe with the settings that the records were made with; a tree that was tuned later is not in it.
    """

    recipe: Recipe
    records: list[QuestionRecord]
    notes: Notes
    summary: list[dict[str, Any]]


def measurement_settings(recipe: Recipe) -> dict[str, Any]:
    """Return all settings that a measurement depends on, for `settings.json`.

    Options of methods are written out, so that a changed default is noticed. Weights in folders that options name are
    hashed, so that changed weights are noticed.

    Raises:
        UserError: A method's kind or options are wrong.
    """
    methods: list[MethodConfig] = []
    weights: dict[str, str] = {}
    for method in recipe.eval.methods:
        if method.kind != DRAFTER_KIND:
            options = load_method_class(method)[1].model_dump()
            method = method.model_copy(update={"options": options})
            values = (option if isinstance(option, list) else [option] for option in options.values())
            folders = (Path(each) for value in values for each in value if isinstance(each, str))
            weights |= {str(each): sampled_hash(each.glob("*.safetensors")) for each in folders if each.is_dir()}
        methods.append(method)
    evaluation = recipe.eval.model_copy(update={"methods": methods, "compile": compiles(recipe)})
    hashes = {name: file_sha256(file) for name, file in questions_files(recipe.eval.question_sets).items()}
    return {
        "eval": evaluation.model_dump(exclude={"runs"}),
        "method_weights": weights,
        "target": recipe.target.model_dump(),
        "seed": recipe.seed,
        "drafter_weights": drafter_weights(recipe),
        "questions_file": hashes if len(hashes) > 1 else next(iter(hashes.values())),
    }


def drafter_weights(recipe: Recipe) -> list[str | None]:
    """Return the SHA-256 of each measured drafter's weights; None where the folder has no weights file."""
    files = [folder / WEIGHTS for folder in drafter_folders(recipe)]
    return [file_sha256(file) if file.is_file() else None for file in files]


def recorded_settings(recipe: Recipe) -> Settings:
    """Read the settings that the records were made with.

    Raises:
        UserError: The file is damaged, or holds values that recipes no longer accept.
    """
    folder = RunFolder(recipe).eval
    return read_json(folder / SETTINGS, Settings, f"delete the folder {folder} to measure again")


def recorded_measurement(recipe: Recipe) -> Measurement:
    """Read the records of the runs that the recipe asks for, and compute the summary from them.

    `result.json` is not read: it is written for other programs.

    Raises:
        UserError: No measurement has finished yet, or a file is damaged.
    """
    folder = RunFolder(recipe)
    if not (folder.eval / RECORDS).is_file() or not (folder.eval / NOTES).is_file():
        raise UserError(f"{folder.eval} holds no finished measurement: run `draftsmith eval` with this recipe first")
    records = [record for record in RecordLog(folder.eval / RECORDS) if record.run < recipe.eval.runs]
    settings = recorded_settings(recipe)
    measured = {
        "eval": settings.eval.model_copy(update={"runs": recipe.eval.runs}),
        "target": settings.target,
        "seed": settings.seed,
    }
    recipe = recipe.model_copy(update=measured)
    notes = read_json(folder.eval / NOTES, Notes, EVAL_AGAIN)
    notes.command = notes.command or f"draftsmith run {shlex.quote((folder.root / 'recipe.yaml').as_posix())}"
    rows = summarize(records, recorded_divergences(recipe))
    summary = [row | {"target_change": notes.target_change} for row in rows]
    return Measurement(recipe, records, notes, summary)


def recorded_divergences(recipe: Recipe) -> list[RecordedDivergence]:
    """Read from `divergences.json` where methods' greedy answers differ from the target's; empty without the file."""
    file = RunFolder(recipe).eval / DIVERGENCES
    return read_json(file, list[RecordedDivergence], EVAL_AGAIN, "answers") if file.is_file() else []


def recorded_proof(recipe: Recipe) -> dict[str, Any] | None:
    """Read the result of `draftsmith prove`; None if it was not run with the weights that the drafters have now."""
    file = RunFolder(recipe).eval / PROOF
    if not file.is_file():
        return None
    proof = read_json(file, Proof, "delete it and run `draftsmith prove` again")
    # `as_json` computes the verdicts again from the figures.
    return proof.as_json() if proof.drafter_weights == drafter_weights(recipe) else None


# ---- the proof ----


@dataclass
class GreedyProof:
    """Comparison of a method's greedy answers with the target's; holds if they differ only at numerical ties."""

    method: str
    prompts: int
    tokens: int
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(divergence.is_tie for divergence in self.divergences)

    @property
    def ties(self) -> int:
        return sum(divergence.is_tie for divergence in self.divergences)


@dataclass
class DistributionProof:
    """Chi-square test of a method's sampled tokens.

    impossible: number of tokens to which the target gives probability 0.
    """

    method: str
    temperature: float
    tokens: int
    impossible: int
    chi_square: float
    p_value: float

    def holds(self, significance: float) -> bool:
        return self.impossible == 0 and self.p_value >= significance


@dataclass
class Proof:
    """All evidence that `draftsmith prove` collected; its exit code is 0 if `holds`."""

    greedy: list[GreedyProof]
    distribution: list[DistributionProof]
    enumeration_error: float
    drafter_weights: list[str | None]  # SHA-256 of the weights that were proved
    left_out: list[str] = field(default_factory=list)  # methods with lenience, which do not claim to be lossless

    @property
    def significance(self) -> float:
        """Return the significance level of one distribution test (Bonferroni)."""
        return SIGNIFICANCE / max(1, len(self.distribution))

    @property
    def holds(self) -> bool:
        return (
            all(proof.holds for proof in self.greedy)
            and all(proof.holds(self.significance) for proof in self.distribution)
            and self.enumeration_error <= ENUMERATION_TOLERANCE
        )

    def as_json(self) -> dict[str, Any]:
        """Return the figures with their verdicts, as JSON stores them."""
        significance = self.significance
        return {
            "holds": self.holds,
            **asdict(self),
            "greedy": [{**asdict(proof), "holds": proof.holds, "ties": proof.ties} for proof in self.greedy],
            "distribution": [{**asdict(proof), "holds": proof.holds(significance)} for proof in self.distribution],
            "significance": significance,
        }


# ---- the tuned tree ----


def with_tuned_trees(recipe: Recipe) -> Recipe:
    """Return the recipe with every `tree: tuned` replaced by the tree that its drafter was tuned to."""
    methods = [resolve_tuned(method, drafter_folder(recipe, method)) for method in recipe.eval.methods]
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": methods})})


def resolve_tuned(method: MethodConfig, drafter_folder: Path) -> MethodConfig:
    """Return the method with `tree: tuned` replaced by the tree in the drafter's config, or best-first without one."""
    if method.tree != "tuned":
        return method
    config = drafter_config(drafter_folder)
    if TUNED_TREE not in config:
        return method.model_copy(update={"tree": "best_first"})
    try:
        tuned = MethodConfig.model_validate({**config[TUNED_TREE], "name": method.name})
    except (TypeError, ValueError):
        raise UserError(
            f"{drafter_folder / 'config.json'}: key `{TUNED_TREE}` holds no valid tree: delete that key, then run "
            "`draftsmith tune` again"
        ) from None
    return method.model_copy(update=tree_settings(tuned))


def write_tuned(drafter_folder: Path, method: MethodConfig) -> None:
    """Write the tree into the drafter's config, which is copied and published with the weights."""
    config = {**drafter_config(drafter_folder), TUNED_TREE: tree_settings(method)}
    write_atomically(drafter_folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def tree_settings(method: MethodConfig) -> dict[str, Any]:
    """Return the settings of a method that define its draft tree, by key."""
    return {key: getattr(method, key) for key in ("tree", "max_depth", "nodes", "branch", "paths", "lookup")}


# ---- the model card ----


def update_card(recipe: Recipe, publication: Publication | None = None) -> None:
    """Write the model card of the run's own drafter again, with the measurement and the proof of its weights."""
    if (RunFolder(recipe).drafter / "config.json").is_file():
        write_drafter_card(recipe, card_figures(recipe), proof_sentence(recorded_proof(recipe)), publication)


def card_figures(recipe: Recipe) -> dict[str, Any] | None:
    """Collect the figures for `write_drafter_card`; None if the drafter's present weights were not measured."""
    folder = RunFolder(recipe)
    if not (folder.eval / NOTES).is_file():
        return None
    measurement = recorded_measurement(recipe)
    measured, notes = measurement.recipe, measurement.notes
    if recorded_settings(recipe).drafter_weights != drafter_weights(measured):
        return None
    own = {m.name for m in measured.eval.methods if m.kind == DRAFTER_KIND and m.drafter is None}
    rows = [
        row
        for row in measurement.summary
        if row["category"] == OVERALL and row["method"] in own and row["tau"] is not None
    ]
    if not rows:
        return None
    machine, names = folder.provenance("eval").machine, list(map(set_name, measured.eval.question_sets))
    recipe_file = shlex.quote((folder.root / "recipe.yaml").as_posix())  # on the Hub: in the card's folder
    return {
        "rows": rows,
        "questions": f"{notes.questions} questions of {', '.join(f'`{name}`' for name in names)}",
        "command": portable(masked(str(notes.command).replace(recipe_file, "recipe.yaml"))),
        "machine": notes.device or f"{machine.processor}, {machine.cpu_count} CPUs",
    }
