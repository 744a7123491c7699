"""What `tune`, `prove` and `eval` leave in a run's folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from support.finished_run import FinishedRun

from draftsmith.cli.artifacts import WEIGHTS, update_card
from draftsmith.cli.evaluate import evaluate
from draftsmith.cli.prove import prove
from draftsmith.cli.tune import tune
from draftsmith.errors import UserError
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.results import RESULT_KEYS


def test_results_of_an_evaluation(finished: FinishedRun) -> None:
    folder = RunFolder(load_recipe(finished.recipe))
    report = (folder.root / "report.html").read_text()
    assert "<p>Proved: " in report
    assert "baseline&#39;s step reads " in report
    result = json.loads((folder.eval / "result.json").read_text())
    assert tuple(result) == RESULT_KEYS
    (baseline,) = result["figures"]["baseline"]
    rows = result["figures"]["rows"]
    assert baseline["step_s"] == rows["autoregressive@0"]["timing"]["t_target_step_s"]
    assert baseline["share"] == pytest.approx(baseline["step_bytes_per_s"] / baseline["read_bytes_per_s"])
    # The measurement records its tree, so that results of another tuning are not mixed in.
    settings = json.loads((folder.eval / "settings.json").read_text())
    assert (settings["eval"]["methods"][0]["tree"], settings["eval"]["methods"][0]["nodes"]) == ("best_first", 3)


@pytest.mark.slow
def test_tuning_stores_the_fastest_tree(finished: FinishedRun) -> None:
    recipe = load_recipe(finished.recipe)
    tuned = tune(recipe, questions=1, new_tokens=8, turns=1)
    speeds = {id(method): figures.against_default for method, figures in tuned.measured}
    assert speeds[id(tuned.chosen)] == max(speeds.values())
    assert any(method is tuned.default for method, *_ in tuned.measured)
    tree = json.loads((RunFolder(recipe).drafter / "config.json").read_text())["tuned_tree"]
    assert tree["tree"] == tuned.chosen.tree


def test_model_card_has_figures_and_proof_of_its_weights_only(finished: FinishedRun) -> None:
    """Edits of `result.json` or of the proof's verdict do not reach it."""
    recipe = load_recipe(finished.recipe)
    folder = RunFolder(recipe)
    card = folder.drafter / "README.md"
    text = ModelCard.load(card).text
    result_file, proof_file = folder.eval / "result.json", folder.eval / "proof.json"
    result, proof = json.loads(result_file.read_text()), json.loads(proof_file.read_text())
    row = result["figures"]["rows"]["tuned@0"]
    assert f"| tuned | 0 | {row['tau']:.2f} | {row['tau_without_bonus']:.2f} | {row['speedup_mean']:.2f} |" in text
    assert "| x |" not in text, "what is not this drafter's"
    assert "Proved: " in text
    assert "On 2 questions of `questions`" in text
    row |= {"speedup_mean": 99.0, "tau": 98.0}
    result_file.write_text(json.dumps(result))
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
def test_stage_without_a_drafter_is_reported(
    stage: Callable[[Recipe], object], finished: FinishedRun, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no trained drafter"):
        stage(load_recipe(finished.recipe, [f"runs_dir={tmp_path}"]))
