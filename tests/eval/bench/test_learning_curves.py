"""Curves of finished trainings: means over tenths of the steps, and the last accuracies on rows kept out."""

import json
from pathlib import Path

import pytest
from support.benchmark_scripts import benchmark, figures_of

from draftsmith.recipes.errors import UserError

script = benchmark("drafters/learning_curves")


def finished(folder: Path) -> Path:
    history = [
        {"step": step, "loss": 1.0, "accuracy_depth1": step / 100, "accuracy_depth2": step / 200}
        for step in range(1, 21)
    ]
    kept_out = {"eval_accuracy_depth1": 0.5, "eval_accuracy_depth2": 0.25, "eval_tau_depth1": 1.5}
    record = {"steps": 20, "tokens": 900, "history": [*history, {"step": 20, **kept_out, "eval_tau_depth2": 1.6}]}
    record["settings"] = {"drafter.kind": "dspark", "train.learning_rate": 0.001}
    (folder / "drafter").mkdir(parents=True)
    (folder / "drafter" / "training.json").write_text(json.dumps(record))
    return folder


def test_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty logs, two for each tenth: 0.015 at first, 0.195 at last."""
    run, picture = finished(tmp_path / "mine"), tmp_path / "curves.png"
    (one,) = figures_of(script, tmp_path, monkeypatch, str(run), "--picture", str(picture))["curves"]
    assert (one["run"], one["kind"], one["steps"], one["learning_rate"]) == ("mine", "dspark", 20, 0.001)
    assert [point["step"] for point in one["curve"]] == list(range(2, 21, 2))
    assert one["curve"][0]["accuracy_by_depth"] == pytest.approx([0.015, 0.0075], abs=1e-4)
    assert one["curve"][-1]["accuracy_by_depth"] == pytest.approx([0.195, 0.0975], abs=1e-4)
    assert one["kept_out"] == {"accuracy_by_depth": [0.5, 0.25], "chain_tau_by_depth": [1.5, 1.6]}
    assert picture.stat().st_size > 5000


def test_a_training_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished training"):
        script.curve(tmp_path)
