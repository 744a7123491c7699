"""A drafter beside a changed target: two trainings by the minute, nothing trained twice, and what follows from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import recipe_file, tiny_run
from typer.testing import CliRunner

from draftsmith.eval.commands import adopt as adopt_module
from draftsmith.eval.commands.adopt import ANEW, ON, PILOT_STEPS, Point, advice
from draftsmith.eval.commands.cli import app
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.train.drafter.report import TrainReport


def test_two_trainings_beside_it_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are kept out are the same for all; a second call finds every leg and says the same."""
    monkeypatch.setattr(adopt_module, "run_distill", lambda recipe: None)
    methods = [{"name": "tree", "tree": "best_first", "nodes": 4, "lookup": True}]
    train = {"learning_rate": 5e-3}
    recipe = tiny_run(
        tmp_path,
        "mine",
        drafter={"kind": "eagle_parallel"},
        data={"eval_rows_frac": 0.4},
        train=train,
        eval={"methods": methods},
    )
    torch.manual_seed(3)
    given = load_drafter_class("parallel").from_target(load_target(recipe.target)[0], {"num_masks": 2})
    given.save_pretrained(tmp_path / "given")
    trained: list[TrainReport] = []
    train_drafter = adopt_module.train_drafter
    monkeypatch.setattr(adopt_module, "train_drafter", lambda leg: trained.append(train_drafter(leg)) or trained[-1])
    command = ["adopt", recipe_file(recipe), "--drafter", str(tmp_path / "given"), "--minutes", "0.1", "--legs", "2"]
    found: list[dict[str, Any]] = []
    for _ in range(2):
        result = CliRunner().invoke(app, [*command, "--rows", "3", f"--json={tmp_path / 'found.json'}"])
        assert result.exit_code == 0, result.output
        found.append(json.loads((tmp_path / "found.json").read_text()))
    assert found[0] == found[1] == json.loads((RunFolder(recipe).root / "adopt.json").read_text())
    assert [report.was_finished for report in trained] == [False] * 6 + [True] * 6
    points = found[0]["points"]
    assert [point["way"] for point in points] == [ON, ANEW] * 3
    assert [point["steps"] for point in points[:2]] == [PILOT_STEPS] * 2
    for way in (ON, ANEW):
        seconds = [point["seconds"] for point in points if point["way"] == way]
        assert seconds == sorted(seconds)
        assert seconds[-1] < 60
    for point in points:
        assert point["low"] <= point["tau"] - found[0]["tau"] + 1e-9
        assert point["tau"] - found[0]["tau"] <= point["high"] + 1e-9
    kinds = [json.loads((Path(point["drafter"]) / "config.json").read_text())["model_type"] for point in points[:2]]
    assert kinds == ["draftsmith-parallel", "draftsmith-eagle_parallel"]
    assert found[0]["rows"] == 3
    assert (RunFolder(recipe).root / "adopt.png").is_file()
    assert found[0]["advice"] in result.stdout.replace("\n", " ")


def test_it_needs_a_drafter_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt_module, "run_distill", lambda recipe: pytest.fail("nothing is distilled for it"))
    recipe = tiny_run(tmp_path, "mine")
    without = CliRunner().invoke(app, ["adopt", recipe_file(recipe)])
    assert (without.exit_code, without.stderr.count("--drafter")) == (2, 2)
    nowhere = CliRunner().invoke(app, ["adopt", recipe_file(recipe), "--drafter", str(tmp_path / "nowhere")])
    assert nowhere.exit_code == 2
    assert nowhere.stderr.count("\n") <= 3


def test_advice() -> None:
    def points(on: tuple[float, float, float], anew: tuple[float, float, float]) -> list[Point]:
        ways = ((ON, on), (ANEW, anew))
        return [Point(way, 300.0, 90, *values, f"runs/{way}") for way, values in ways]

    assert advice("x/y", 2.0, points((2.1, -0.1, 0.3), (1.5, -0.7, -0.3))).startswith("use x/y as it is")
    said = advice("x/y", 2.0, points((2.4, 0.2, 0.6), (2.1, -0.1, 0.3)))
    assert said == "go on from it: tau 2.00 -> 2.40 (+0.20 to +0.60) in 5.0 minutes, runs/going on"
    assert advice("x/y", 2.0, points((2.4, 0.2, 0.6), (2.9, 0.7, 1.1))).startswith(
        "train one from nothing: tau 2.00 ->"
    )
    longer = [*points((2.2, 0.0, 0.4), (2.0, -0.2, 0.2)), *points((2.4, 0.2, 0.6), (2.1, -0.1, 0.3))]
    assert advice("x/y", 2.0, longer).endswith("it still rises: train longer")
