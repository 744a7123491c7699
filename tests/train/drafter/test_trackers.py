"""Real trackers of `train.report_to`, offline: config, curves by depth, the report's table.

Each test is skipped if its optional tracker is not installed.
"""

import json
from pathlib import Path

import pytest
from support.tiny_runs import InterruptAt, history_of, make_recipe, train_until
from support.wandb_file import items_of, wandb_records

from draftsmith.errors import UserError
from draftsmith.eval.report.tracked import FILES, add_to_trackers
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.trackers import check_trackers, tracked_run

pytestmark = pytest.mark.slow
SUMMARY = [
    {"method": "autoregressive", "tau": 1.0, "speedup_mean": 1.0, "greedy_identical": None},
    {"method": "chain", "tau": 2.5, "speedup_mean": 1.75, "greedy_identical": True},
]
STEPS = [2, 4, 6]


def recipe_with(target_folder: Path, tracker: str) -> Recipe:
    values = make_recipe(target_folder, "tracked", report_to=tracker, eval_strategy="steps", eval_steps=2).model_dump()
    values["data"]["eval_rows_frac"] = 0.3
    return Recipe.model_validate(values)


def curve(recipe: Recipe, name: str) -> list[float]:
    return [log[name] for log in history_of(recipe) if name in log]


def with_report(recipe: Recipe) -> None:
    folder = RunFolder(recipe)
    for name in FILES:
        (folder.root / name).parent.mkdir(exist_ok=True)
        (folder.root / name).write_text(name)


@pytest.fixture
def offline_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_wandb_offline(target_folder: Path, offline_wandb: None) -> None:
    recipe = recipe_with(target_folder, "wandb")
    train_drafter(recipe)
    records = wandb_records(RunFolder(recipe).root)
    history = items_of(records["history"], "item")
    for depth in (1, 2, 3):
        assert history[f"train/loss_depth{depth}"] == curve(recipe, f"loss_depth{depth}")
        assert history[f"train/accuracy_depth{depth}"] == curve(recipe, f"accuracy_depth{depth}")
        assert history[f"eval/tau_depth{depth}"] == curve(recipe, f"eval_tau_depth{depth}")
    assert len(history["train/loss_depth1"]) == len(STEPS)
    config = {key: values[-1] for key, values in items_of(records["config"], "update").items()}
    assert config["recipe"]["train"]["learning_rate"] == recipe.train["learning_rate"]
    assert config["recipe"]["drafter"]["options"] == recipe.drafter.options
    assert config["num_masks"] == 2  # from the drafter's config, by transformers' callback
    (run,) = records["run"][:1]
    assert (run.project, run.display_name) == ("draftsmith", "tracked")
    with_report(recipe)
    add_to_trackers(recipe, SUMMARY)
    records = wandb_records(RunFolder(recipe).root)
    assert {run.run_id for run in records["run"]} == {tracked_run(RunFolder(recipe))["wandb_id"]}
    artifacts = {artifact.name: artifact for artifact in records["artifact"]}
    assert artifacts["tracked-report"].type == "report"
    contents = {entry.path for entry in artifacts["tracked-report"].manifest.contents}
    assert contents == {"report.md", "report.html", "result.json", "table.table.json"}
    history = items_of(records["history"], "item")
    assert (history["report/ncols"], history["report/nrows"]) == ([len(SUMMARY[0])], [len(SUMMARY)])


def test_resumed_run_continues_in_wandb(
    target_folder: Path, offline_wandb: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_with(target_folder, "wandb")

    train_until(InterruptAt(5), recipe, monkeypatch)
    train_drafter(recipe)
    runs = wandb_records(RunFolder(recipe).root)["run"]
    assert len({run.run_id for run in runs}) == 1
    assert len(list((RunFolder(recipe).root / "wandb").glob("offline-run-*"))) == 2


def test_wandb_error_is_reported(target_folder: Path, offline_wandb: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "no/such:project")
    with pytest.raises(UserError, match=r"wandb cannot start .*run `wandb login`, or set WANDB_MODE=offline"):
        train_drafter(recipe_with(target_folder, "wandb"))


def test_tensorboard(target_folder: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_with(target_folder, "tensorboard")
    train_drafter(recipe)
    with_report(recipe)
    add_to_trackers(recipe, SUMMARY)
    folder = RunFolder(recipe).root / "tensorboard"
    events = EventAccumulator(str(folder)).Reload()
    for depth in (1, 2, 3):
        scalars = events.Scalars(f"train/loss_depth{depth}")
        assert [scalar.value for scalar in scalars] == pytest.approx(curve(recipe, f"loss_depth{depth}"))
        assert [scalar.step for scalar in scalars] == STEPS
        taus = [scalar.value for scalar in events.Scalars(f"eval/tau_depth{depth}")]
        assert taus == pytest.approx(curve(recipe, f"eval_tau_depth{depth}"))
    (resolved,) = events.Tensors("recipe/text_summary")
    assert b"learning_rate: 0.01" in resolved.tensor_proto.string_val[0]
    (table,) = events.Tensors("report/text_summary")
    lines = table.tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == "| method | tau | speedup_mean | greedy_identical |"
    assert lines[3] == "| chain | 2.5 | 1.75 | True |"


def test_trackio(target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    recipe = recipe_with(target_folder, "trackio")
    train_drafter(recipe)
    with_report(recipe)
    add_to_trackers(recipe, SUMMARY)
    (run,) = trackio.Api().runs("draftsmith")
    assert run.name == "tracked"
    assert run.config["recipe"]["train"]["learning_rate"] == recipe.train["learning_rate"]
    logs = SQLiteStorage.get_logs("draftsmith", "tracked")
    for name in ("train/loss_depth3", "eval/tau_depth3"):
        values = [log[name] for log in logs if name in log]
        assert values == curve(recipe, name.replace("train/", "").replace("/", "_"))
    (table,) = [log["report"] for log in logs if "report" in log]
    assert "chain" in json.dumps(table)
    assert [artifact["name"] for artifact in SQLiteStorage.get_artifacts("draftsmith")] == ["tracked-report"]


def test_unknown_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"`train.report_to`: unknown tracker wandbb: did you mean `wandb`"):
        check_trackers(["wandbb"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb is not installed: `pip install 'draftsmith\[wandb\]'`"):
        check_trackers(["wandb"])
