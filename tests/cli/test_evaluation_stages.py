"""`tune`, `prove` and `eval` in sequence, on the embedded target and an untrained drafter.

They run once; every test has a copy of their run folder.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from draftsmith.cli.artifacts import WEIGHTS, Proof, update_card
from draftsmith.cli.evaluate import evaluate
from draftsmith.cli.prove import prove
from draftsmith.cli.tune import Tuned, tune
from draftsmith.errors import UserError
from draftsmith.eval.bench.measured_methods import load_models
from draftsmith.eval.bench.records import RecordLog
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.loading import EMBEDDED_TARGET, load_target
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.results import RESULT_KEYS

pytestmark = pytest.mark.slow


@dataclass
class Stages:
    """Results of the stages. `card`: the model card after the proof, before any measurement."""

    recipe: Recipe
    tuned: Tuned
    proof: Proof
    card: str
    summary: list[dict[str, Any]]
    weights: list[torch.Tensor]  # of the session loaded by tune


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    if not (EMBEDDED_TARGET / "config.json").exists():
        pytest.skip("needs the embedded target")
    overrides = [
        f"runs_dir={tmp_path_factory.mktemp('runs')}",
        "eval.limit_per_category=1",
        "eval.max_new_tokens=12",
        "eval.runs=1",
        "eval.warmup_questions=0",
        "eval.methods=[{name: tuned, tree: tuned}, {name: lookup, kind: prompt_lookup}, "
        "{name: hasty, kind: prompt_lookup, lenience: 0.001}]",
    ]
    recipe = load_recipe("quickstart", overrides)
    torch.manual_seed(0)
    target, _ = load_target(recipe.target)
    drafter = load_drafter_class("parallel").from_target(target, recipe.drafter.options)
    drafter.save_pretrained(RunFolder(recipe).drafter)
    weights: list[torch.Tensor] = []

    def watched(recipe: Recipe) -> tuple[Any, ...]:
        models = load_models(recipe)
        weights.extend(weight for model in (models[0], *models[2].values()) for weight in model.parameters())
        return models

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.cli.tune.load_models", watched)
        tuned = tune(recipe, questions=1, new_tokens=12, turns=1)
    proof = prove(recipe, prompts=3, samples=2, new_tokens=16)
    card = (RunFolder(recipe).drafter / "README.md").read_text()
    return Stages(recipe, tuned, proof, card, evaluate(recipe), weights)


@pytest.fixture
def recipe(stages: Stages, tmp_path: Path) -> Recipe:
    copied = stages.recipe.model_copy(update={"runs_dir": str(tmp_path)})
    shutil.copytree(RunFolder(stages.recipe).root, RunFolder(copied).root)
    return copied


def test_stages_in_sequence(stages: Stages) -> None:
    folder, tuned, proof = RunFolder(stages.recipe), stages.tuned, stages.proof
    speeds = {id(method): figures.against_default for method, figures in tuned.measured}
    assert speeds[id(tuned.chosen)] == max(speeds.values())
    assert any(method is tuned.default for method, *_ in tuned.measured)
    tree = json.loads((folder.drafter / "config.json").read_text())["tuned_tree"]
    assert tree["tree"] == tuned.chosen.tree
    # Packed layers read their weights' version counter, which tensors created in inference mode lack.
    assert stages.weights
    assert not any(weight.is_inference() for weight in stages.weights)

    assert proof.holds
    assert {row.method for row in proof.greedy} == {"tuned", "lookup"}
    assert {row.method for row in proof.distribution} == {"autoregressive", "tuned", "lookup"}
    assert all(row.tokens >= 20 for row in proof.distribution)
    assert proof.left_out == ["hasty"]

    assert "Proved: " in stages.card
    assert "## Measured" not in stages.card

    overall = {row["method"]: row for row in stages.summary if row["category"] == "overall"}
    assert set(overall) == {"autoregressive", "tuned", "lookup", "hasty"}
    assert all(row["greedy_identical"] for row in overall.values() if row["lossless"])
    assert [name for name, row in overall.items() if not row["lossless"]] == ["hasty"]
    assert "## Is it lossless?\n\nProved: " in (folder.root / "report.md").read_text()
    timing = {row["method"]: row for row in json.loads((folder.eval / "timing.json").read_text())}
    result = json.loads((folder.eval / "result.json").read_text())
    assert tuple(result) == RESULT_KEYS
    (baseline,) = result["figures"]["baseline"]
    assert baseline["step_s"] == timing["autoregressive"]["t_target_step_s"]
    assert baseline["share"] == pytest.approx(baseline["step_bytes_per_s"] / baseline["read_bytes_per_s"])
    assert "The baseline's step reads " in (folder.root / "report.md").read_text()
    assert {name: row["timing"] for name, row in result["figures"]["rows"].items() if "timing" in row} == {
        f"{method}@0": row for method, row in timing.items()
    }
    # The measurement records its tree, so that results of another tuning are not mixed in.
    settings = json.loads((folder.eval / "settings.json").read_text())
    assert settings["eval"]["methods"][0]["tree"] == tuned.chosen.tree


def test_processes_share_the_questions(stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes measure every question once, with the answers of one process; then nothing is left to measure."""
    recipe = stages.recipe.model_copy(update={"runs_dir": str(tmp_path)})
    shutil.copytree(RunFolder(stages.recipe).root, RunFolder(recipe).root)
    shutil.rmtree(RunFolder(recipe).eval)
    monkeypatch.setattr("draftsmith.cli.evaluate.gpus_for", lambda processes: ["7"] * processes)  # unused here
    evaluate(recipe, processes=2)
    alone, shared = (list(RecordLog(RunFolder(each).eval / "records.jsonl")) for each in (stages.recipe, recipe))
    answers = {record.question_id: {key: answer.ids for key, answer in record.answers.items()} for record in shared}
    assert answers == {record.question_id: {k: a.ids for k, a in record.answers.items()} for record in alone}
    assert len(shared) == len(alone)
    by_process = Counter(record.answers["autoregressive@0"].process for record in shared)
    assert sorted(by_process.values()) == [len(alone) // 2, len(alone) - len(alone) // 2]


def test_model_card_has_figures_and_proof_of_its_weights_only(recipe: Recipe) -> None:
    """Edits of `summary.json` or of the proof's verdict do not reach it."""
    folder = RunFolder(recipe)
    card = folder.drafter / "README.md"
    text = ModelCard.load(card).text
    summary_file, proof_file = folder.eval / "summary.json", folder.eval / "proof.json"
    summary, proof = json.loads(summary_file.read_text()), json.loads(proof_file.read_text())
    (row,) = (row for row in summary if (row["method"], row["category"]) == ("tuned", "overall"))
    assert f"| tuned | 0 | {row['tau']:.2f} | {row['tau_without_bonus']:.2f} | {row['speedup_mean']:.2f} |" in text
    assert "| lookup |" not in text, "what is not this drafter's"
    assert "Proved: " in text
    assert "On 7 questions of `embedded`" in text
    summary_file.write_text(json.dumps([{**row, "speedup_mean": 99.0, "tau": 98.0} for row in summary]))
    update_card(recipe)
    assert ModelCard.load(card).text == text
    proof_file.write_text(json.dumps({**proof, "holds": True, "enumeration_error": 0.5}))
    update_card(recipe)
    assert "NOT PROVED: " in card.read_text()
    (folder.drafter / WEIGHTS).write_bytes((folder.drafter / WEIGHTS).read_bytes() + b"\0")
    update_card(recipe)
    assert "## Measured" not in card.read_text()
    assert "## Is it lossless?" not in card.read_text()


@pytest.mark.parametrize("stage", [tune, prove, evaluate])
def test_stage_without_a_drafter_is_reported(stage: Callable[[Recipe], object], recipe: Recipe) -> None:
    with pytest.raises(UserError, match="no trained drafter"):
        stage(recipe.model_copy(update={"name": "nothing-trained"}))
