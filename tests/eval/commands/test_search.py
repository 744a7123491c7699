"""The same budget for every kind: which trials there are, what they are scored by, and that none is trained twice."""

import json
from pathlib import Path

import pytest
from support.tiny_runs import recipe_file, tiny_run
from typer.testing import CliRunner

from draftsmith.eval.commands import search as search_module
from draftsmith.eval.commands.cli import app
from draftsmith.eval.commands.search import trial_values
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import load_recipe
from draftsmith.train.drafter.report import TrainReport


def test_trials_are_the_same_for_every_kind_and_never_change() -> None:
    """Learning rates at 1/2, 1/4 and 3/4 of the way from a quarter to four times the recipe's."""
    eagle, parallel = load_recipe("embedded-eagle"), load_recipe("embedded-eagle_parallel")
    assert trial_values(eagle, 0) == {}
    assert [trial_values(eagle, number)["train.learning_rate"] for number in (1, 2, 3)] == [6e-3, 3e-3, 1.2e-2]
    for number in range(1, 9):
        of_eagle, of_parallel = trial_values(eagle, number), trial_values(parallel, number)
        assert set(of_eagle) == {"train.learning_rate", "drafter.options.class_weight"}
        assert set(of_parallel) == {*of_eagle, "drafter.options.depth_weights", "drafter.options.depth_ramp"}
        assert of_eagle.items() <= of_parallel.items()
    drawn = [trial_values(parallel, number)["drafter.options.depth_weights"] for number in range(1, 9)]
    assert len(set(drawn)) == 3
    flagship = load_recipe("embedded-parallel")
    begun = [trial_values(flagship, number)["drafter.options.init"] for number in range(1, 9)]
    assert set(begun) == {"target", "random"}


def test_a_whole_search_goes_on_where_it_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "run_distill", lambda recipe: None)
    methods = [{"name": "chain"}, {"name": "tree", "tree": "best_first", "nodes": 4}]
    data = {"eval_rows_frac": 0.4}
    recipe = tiny_run(tmp_path, "mine", drafter={"options": {"num_masks": 2}}, data=data, eval={"methods": methods})
    trained: list[TrainReport] = []
    train = search_module.train_drafter

    def noted(trial: object) -> TrainReport:
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(train(trial))  # type: ignore[arg-type]
        return trained[-1]

    command = ["search", recipe_file(recipe), "--trials", "3", "--steps", "4", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(search_module, "train_drafter", noted)
    assert CliRunner().invoke(app, command).exit_code == 130
    monkeypatch.setattr(search_module, "train_drafter", lambda trial: trained.append(train(trial)) or trained[-1])
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert [report.was_finished for report in trained] == [False, True, False, False]
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert (found["recipe"], found["budget"]) == ("mine", {"trials": 3, "steps": 4, "rows": 32})
    trials = found["trials"]
    assert [trial["number"] for trial in trials] == [0, 1, 2]
    for trial in trials:
        assert set(trial["taus"]) == {"chain", "tree"}
        assert 1.0 <= trial["taus"]["chain"] <= trial["taus"]["tree"] <= 4.0
        assert trial["score"] == sum(trial["taus"].values()) / 2
        training = json.loads(
            (tmp_path / "runs" / f"mine-trial-{trial['number']}-of-4-steps" / "drafter" / "training.json").read_text()
        )
        evaluated = [entry for entry in training["history"] if "eval_loss" in entry]
        # The trainer's own replay, from one forward, is that of the decoder.
        assert trial["taus"]["chain"] == pytest.approx(evaluated[-1]["eval_tau_depth3"], abs=1e-4)
    best = max(trials, key=lambda trial: trial["score"])
    assert found["chosen"] == best["values"]
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert (tmp_path / "found.json").read_text() == json.dumps([found], indent=2) + "\n"


def test_what_cannot_be_searched() -> None:
    with pytest.raises(UserError, match="medusa2 changes its target, whose known answers are not its own: use"):
        search_module.search_recipe(load_recipe("embedded-medusa2"), search_module.SearchBudget(1, 1, 1))
    lookup = load_recipe("quickstart", ["eval.methods=[{name: lookup, kind: prompt_lookup}]"])
    with pytest.raises(UserError, match="quickstart has no method with a drafter of its own to score"):
        search_module.search_recipe(lookup, search_module.SearchBudget(1, 1, 1))
