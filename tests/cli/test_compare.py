"""Several recipes in one table, with one baseline, one process and shared data."""

import json
import shlex
from pathlib import Path

import pytest
from markupsafe import escape
from support.finished_run import FinishedRun
from support.tiny_runs import recipe_file
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.cli.stages import compare, joint_recipe, reuse_data, with_seeds
from draftsmith.data.distill.ledger import LedgerView
from draftsmith.errors import UserError
from draftsmith.recipes.loading import load_compared, load_recipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.results import portable


def test_recipes_with_values_of_their_own() -> None:
    """They are named after these values; another kind takes its own options, and only its name."""
    quoted = [
        "quickstart drafter.options.num_masks=3",
        "quickstart drafter.kind=eagle name=mine",
        "quickstart drafter.kind=medusa",
    ]
    compared, plain = load_compared(["quickstart", "train.max_steps=3", *quoted])
    assert [(each.name, each.drafter.kind) for each in compared] == [
        ("quickstart", "parallel"),
        ("quickstart-num_masks-3", "parallel"),
        ("mine", "eagle"),
        ("quickstart-medusa", "medusa"),
    ]
    assert (compared[1].drafter.options["num_masks"], compared[3].drafter.options) == (3, {})
    assert {each.train["max_steps"] for each in compared} == {3}
    assert [each.name for each in plain] == ["quickstart"] * 4
    assert load_compared(["quickstart target.model=owner/one"])[0][0].name == "quickstart-model-owner-one"


def test_joint_recipe_names_every_drafter() -> None:
    variants = [f"quickstart drafter.options.inputs={inputs}" for inputs in ("hidden", "both")]
    joint = joint_recipe(load_compared(["runs_dir=elsewhere", *variants])[0], "table")
    assert joint.name == "table"
    assert [(method.name, method.drafter) for method in joint.eval.methods] == [
        (f"quickstart-inputs-{inputs}/parallel-{tree}", f"elsewhere/quickstart-inputs-{inputs}/drafter")
        for inputs in ("hidden", "both")
        for tree in ("chain", "tree", "tree-lookup")
    ]
    kept = joint_recipe([load_recipe("quickstart"), load_recipe("quickstart", ["drafter.kind=medusa"])], "table")
    assert [method.name for method in kept.eval.methods] == [
        "parallel-chain", "parallel-tree", "parallel-tree-lookup", "medusa-chain", "medusa-tree", "medusa-tree-lookup",
    ]  # fmt: skip


def test_seeds_repeat_training_and_measure_other_methods_once() -> None:
    recipe = load_recipe("quickstart", ["seed=5", "eval.methods=[{name: mine}, {name: lookup, kind: prompt_lookup}]"])
    first, *others = with_seeds([recipe], 3)
    assert first == recipe
    assert [(each.name, each.seed, each.train["seed"]) for each in others] == [
        ("quickstart-seed-1", 5, 6),
        ("quickstart-seed-2", 5, 7),
    ]
    assert [method.name for method in joint_recipe([first, *others], "table").eval.methods] == [
        "quickstart/mine", "quickstart/lookup", "quickstart-seed-1/mine", "quickstart-seed-2/mine",
    ]  # fmt: skip


def test_incomparable_recipes_are_refused() -> None:
    for overrides, table, sentence in (
        (["name=other", "eval.max_new_tokens=64"], "table", r"as eval\.max_new_tokens differ"),
        (["name=other", "target.dtype=float64"], "table", "as target differ"),
        (["name=other"], "quickstart", "option --name: quickstart is the name of a recipe"),
        ([], "table", "key `name`: .* give each a different name"),
    ):
        with pytest.raises(UserError, match=sentence):
            compare([load_recipe("quickstart"), load_recipe("quickstart", overrides)], table)


def test_drafter_that_changes_its_target_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    module = "draftsmith.cli.stages"
    for name in ("make_drafter", "reuse_data"):
        monkeypatch.setattr(f"{module}.{name}", lambda *_: None)
    monkeypatch.setattr(f"{module}.run_eval", lambda recipe, *_: measured.append(recipe.name) or [])
    compare([load_recipe("quickstart", [f"drafter.kind={kind}"]) for kind in ("medusa2", "medusa")], "table")
    assert measured == ["table", "quickstart-medusa2"]


def test_data_are_reused_only_if_settings_match(tmp_path: Path) -> None:
    first = load_recipe("quickstart", [f"runs_dir={tmp_path}", "name=first"])
    (RunFolder(first).data / "tokens").mkdir(parents=True)
    overrides = {"same": "data.packing=true", "other": "data.max_length_tokens=100"}
    for name, override in overrides.items():
        second = load_recipe("quickstart", [f"runs_dir={tmp_path}", f"name={name}", override])
        reuse_data(second, [first, second])
        assert (RunFolder(second).data / "tokens").is_dir() == (name != "other")


@pytest.mark.slow
def test_compare_command_end_to_end(finished: FinishedRun) -> None:
    """Two kinds of drafters; the second reuses the conversations of the first."""
    medusa = ["drafter.kind=medusa", "drafter.options={num_heads: 2}", "eval.methods=[{name: medusa-chain}]"]
    second = recipe_file(load_recipe(finished.recipe, ["name=second", *medusa]))
    command = ["compare", finished.recipe, second, "--name", "table"]
    runs = finished.root.parent
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    overall = {row["method"]: row for row in rows if row["category"] == "overall"}
    assert list(overall) == ["autoregressive", "tuned", "x", "medusa-chain"]
    assert all(row["greedy_identical"] for row in overall.values())
    first, other = (LedgerView(runs / name / "data") for name in ("run", "second"))
    assert first.fingerprint() == other.fingerprint()
    drafters = [str(runs / name / "drafter") for name in ("run", "second")]
    assert [line.split()[1] for line in result.stderr.splitlines() if line.startswith("Drafter ")] == drafters
    report = (runs / "table" / "report.html").read_text()
    assert "with parallel and medusa drafters" in report
    # Without local folders, which readers of the report do not have.
    assert f"<pre>draftsmith {escape(portable(shlex.join(command)))}</pre>" in report
    assert str(finished.folder) not in report
    again = CliRunner().invoke(app, ["report", str(runs / "table" / "recipe.yaml")])
    assert again.exit_code == 0, again.output
    assert (runs / "table" / "report.html").read_text() == report
