"""Training curves by depth, and the figures of the weights that were kept."""

from support.report_facts import row

from draftsmith.eval.report.page.training import compared_drafters, curves_by_depth, differing_settings, training_curves
from draftsmith.models.base.registry import Training
from draftsmith.recipes.schema import Recipe

HISTORY = [
    {"step": 10, "loss": 2.0, "accuracy_depth1": 0.3, "accuracy_depth2": 0.1, "accuracy_depth10": 0.0},
    {"step": 20, "loss": 1.0, "accuracy_depth1": 0.5, "accuracy_depth2": 0.2, "accuracy_depth10": 0.1},
    {"step": 20, "eval_loss": 1.5, "eval_accuracy_depth1": 0.4, "eval_tau_depth1": 1.4},
    {"step": 30, "eval_loss": 1.7, "eval_accuracy_depth1": 0.35, "eval_tau_depth1": 1.3},
    {"train_runtime": 5.0},
]


def test_depths_are_numbers() -> None:
    found = curves_by_depth(HISTORY, "accuracy")
    assert list(found) == ["1", "2", "10"]
    assert found["1"] == [(10, 0.3), (20, 0.5)]
    assert curves_by_depth(HISTORY, "loss") == {}


def test_charts_are_of_what_has_lines() -> None:
    (found,) = training_curves({"run": Training(steps=30, history=HISTORY)})
    titles = [chart.title for chart in found.charts]
    assert titles == [
        "Accuracy by depth, training rows",
        "Accuracy by depth, rows kept out",
        "Simulated tau by chain length, rows kept out",
    ]
    assert [line.name for line in found.charts[0].lines] == ["1", "2", "10"]
    assert training_curves({"run": Training(steps=30, history=[])}) == []


def test_held_out_is_of_the_weights_that_were_kept() -> None:
    for best, step, tau in ((20, 20, 1.4), (None, 30, 1.3)):
        (found,) = training_curves({"run": Training(steps=30, history=HISTORY, best_step=best)})
        assert found.held_out is not None
        assert (found.held_out.step, found.held_out.tau) == (step, [tau])
    (found,) = training_curves({"run": Training(steps=30, history=HISTORY[:2])})
    assert found.held_out is None


def test_drafters_beside_each_other() -> None:
    """Each with its fastest method at the lowest temperature, and the settings in which they differ."""
    methods = [
        {"name": "a-1", "drafter": "/home/x/a/drafter"},
        {"name": "a-2", "drafter": "/home/x/a/drafter"},
        {"name": "own"},
        {"name": "lookup", "kind": "prompt_lookup"},
    ]
    recipe = Recipe.model_validate({"name": "demo", "eval": {"methods": methods}}).model_dump()
    summary = [
        row("a-1", "overall", speedup_mean=1.2), row("a-2", "overall", speedup_mean=1.4),
        row("a-1", "overall", 1.0, speedup_mean=9.0), row("own", "overall", speedup_mean=1.6),
        row("lookup", "overall", speedup_mean=2.0),
    ]  # fmt: skip
    trained = {
        "a": Training(steps=10, history=HISTORY, settings={"drafter.options.num_masks": 4, "seed": 1, "data (x)": "1"}),
        "demo": Training(steps=20, history=[], settings={"drafter.options.num_masks": 8, "seed": 1, "data (x)": "2"}),
    }
    own, a = compared_drafters(trained, recipe, summary)
    assert (own.name, own.row["method"], own.differs, own.held_out) == ("demo", "own", "num_masks 8", None)
    assert (a.name, a.row["method"], a.row["speedup_mean"], a.differs) == ("a", "a-2", 1.4, "num_masks 4")
    assert compared_drafters({"a": trained["a"]}, recipe, summary) == []


def test_settings_that_only_some_have_differ() -> None:
    assert differing_settings([{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}]) == ["b"]
