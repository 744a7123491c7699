"""Figures of the page's sections that would be wrong if the code were: order, places on scales, rounds, curves."""

from dataclasses import replace
from itertools import pairwise

import pytest
from support.report_facts import SUMMARY, TIMING, records_of, row

from draftsmith.eval.bench.traced import TracedAnswer, TracedRound
from draftsmith.eval.report.page import curves
from draftsmith.eval.report.page.curves import (
    Scale,
    compared_drafters,
    curves_by_depth,
    differing_settings,
    line_chart,
    round_values,
    scale_around,
    theory_charts,
    training_curves,
)
from draftsmith.eval.report.page.methods import (
    MOST_DEPTHS,
    category_tables,
    depths_of,
    method_tables,
    predictions,
    tint,
)
from draftsmith.eval.report.page.rounds import (
    SHOWN_PROMPT_CHARS,
    first_rejected,
    mean_rounds,
    shown_answers,
    timeline,
)
from draftsmith.eval.report.summary import acceptance_by_depth, summarize
from draftsmith.models.base.registry import Training
from draftsmith.recipes.schema import Recipe

# ---- methods beside each other ----


def test_order_scale_and_baseline() -> None:
    """Speedups from 0 to 2, with 6 % of that on both sides."""
    rows = [
        row("autoregressive", "overall", tokens_per_s=20.0, speedup_mean=1.0),
        row("slow", "overall", speedup_mean=0.5, speedup_interval=[0.0, 0.9]),
        row("fast", "overall", speedup_mean=1.5, speedup_interval=[1.0, 2.0]),
        row("fast", "math", speedup_mean=9.0, speedup_interval=[8.0, 10.0]),
    ]
    (table,) = method_tables(rows)
    assert [each["method"] for each in table.rows] == ["fast", "slow"]
    assert table.baseline_tokens_per_s == 20.0
    assert (table.scale.low, table.scale.high) == pytest.approx((-0.12, 2.12))
    assert table.scale.percent(1.5) == pytest.approx(100 * 1.62 / 2.24, abs=0.01)
    assert method_tables(rows[:1]) == []
    late = [*SUMMARY, row("late", "overall", speedup_mean=5.0)]
    ((_, categories),) = category_tables(late, ["writing", "math", "overall"])
    assert [overall["method"] for overall, _ in categories] == ["late", "tree", "chain"]
    assert [cell is None for cell in categories[0][1]] == [True, True, False]


def test_against_the_fastest_is_paired_by_question() -> None:
    """Twice the time on every question, however unlike these are: 0.5 without any width."""
    records = records_of({"fast": 0.5, "slow": 1.0}, (0.0, 1.0))
    cold, hot = method_tables(summarize(records), records)
    assert (cold.temperature, hot.temperature) == (0.0, 1.0)
    assert cold.against_best == {"fast@0": None, "slow@0": pytest.approx([0.5, 0.5])}
    assert method_tables(summarize(records))[0].against_best == {}


@pytest.mark.parametrize(
    ("speedup", "ends", "expected"),
    [
        (0.9, None, "slow"), (0.9, [0.8, 0.95], "slow"), (1.1, [0.9, 1.3], "plain"), (0.95, [0.9, 1.3], "plain"),
        (1.1, None, "level-1"), (1.25, None, "level-2"), (1.6, [1.1, 2.0], "level-3"), (7.0, None, "level-5"),
    ],
)  # fmt: skip
def test_tints_say_no_more_than_the_intervals(speedup: float, ends: list[float] | None, expected: str) -> None:
    assert tint(row("x", "math", speedup_mean=speedup, speedup_interval=ends)) == expected


def test_acceptance_by_depth() -> None:
    """Ten rounds that kept 0 (5 times), 1 (3) and 2 (2): 5 of 10 kept depth 1, 2 of 10 depth 2."""
    lengths = [0] * 5 + [1] * 3 + [2] * 2
    row = TIMING[0] | {"acceptance_by_depth": acceptance_by_depth(lengths)}
    (found,) = depths_of([row, row | {"method": "autoregressive"}, row | {"acceptance_by_depth": []}])
    assert found.shares == [(0.5, 0.5), (pytest.approx(0.2), pytest.approx(0.4))]
    assert (found.tau_without_bonus, found.more) == (pytest.approx(sum(lengths) / len(lengths)), 0)
    rows = [
        row | {"method": "deep", "acceptance_by_depth": [0.9] * (MOST_DEPTHS + 3)},
        row | {"method": "seldom", "acceptance_by_depth": [0.001, 0.5, 0.5]},
        row | {"method": "hot", "temperature": 1.0, "acceptance_by_depth": [0.95]},
    ]
    listed = [(each.method, len(each.shares), each.more) for each in depths_of(rows)]
    assert listed == [("deep", MOST_DEPTHS, 3), ("seldom", 1, 2), ("hot", 1, 0)]


def test_predicted_and_measured_on_one_scale() -> None:
    """From 1 to 1.92 with 6 % of that on both sides; the fastest first."""
    found = predictions([TIMING[0] | {"method": "autoregressive"}, *TIMING])
    assert found is not None
    assert [each["method"] for each in found[0]] == ["tree"]
    assert found[1].percent(1.9) == pytest.approx(100 * (0.9 + 0.06 * 0.92) / (1.12 * 0.92), abs=0.01)
    assert predictions([]) is None
    found = predictions([TIMING[0] | {"method": str(n), "speedup_decoding": 1.0 + n} for n in range(3)])
    assert found is not None
    assert [each["method"] for each in found[0]] == ["2", "1", "0"]


# ---- rounds ----


def test_the_mean_round() -> None:
    """1 + 4.5 + 0.2 + 0.123 ms, for 2.5 tokens; the longest fills the picture but for 2 %. The cheapest token first."""
    (found,) = mean_rounds([TIMING[0] | {"method": "worse", "tau": 2.0}, *TIMING])
    assert [lane.method for lane in found.rows] == ["tree", "worse"]
    lane = found.rows[0]
    assert (lane.seconds, lane.tokens, found.target_s) == (pytest.approx(0.005823), 2.5, 0.004)
    parts = lane.rounds[0].parts
    assert [part.phase for part in parts] == ["draft", "forward", "choose", "commit"]
    assert [part.width for part in parts] == [
        pytest.approx(100 * each / 5.823 / 1.02, abs=0.02) for each in (1, 4.5, 0.2, 0.123)
    ]
    assert parts[-1].start + parts[-1].width == pytest.approx(100 / 1.02, abs=0.02)


def test_the_timeline() -> None:
    """Readings go as far as the chain's three rounds of 80 ms: 240 ms, in which the baseline steps four times."""
    found = timeline(records_of({"chain": 1.0}, (0.0, 1.0)))
    assert found is not None
    assert (found.temperature, found.scale.high) == (0.0, pytest.approx(240.0))
    baseline, chain = found.rows
    assert (baseline.method, baseline.tokens, len(baseline.rounds)) == ("autoregressive", 4, 4)
    assert (chain.method, chain.tokens) == ("chain", 9)
    assert [round_.tokens for round_ in chain.rounds] == [3, 3, 3]
    assert [(part.phase, part.start, part.width) for part in chain.rounds[0].parts] == [
        ("draft", 0.0, pytest.approx(8.33)),
        ("forward", pytest.approx(8.33), pytest.approx(20.84)),
        ("choose", pytest.approx(29.17), pytest.approx(2.08)),
        ("commit", pytest.approx(31.25), pytest.approx(2.08)),
    ]
    assert chain.rounds[1].parts[0].start == pytest.approx(100 / 3, abs=0.01)


def test_a_round_that_goes_on_is_cut_and_not_counted() -> None:
    """A method whose one reading lasts 100 ms ends the picture in the second step of the baseline."""
    for phases, shown in (([[0.1, 0.0, 0.0, 0.0]], True), ([], False)):
        records = records_of({"chain": 1.0})
        for record in records:
            turn = record.answers["chain@0"].turns[0]
            record.answers["chain@0"].turns[0] = replace(turn, phases_s=phases)
        found = timeline(records)
        assert (found is not None) == shown, "records of earlier versions have no readings"
        if found is not None:
            assert [round_.cut for round_ in found.rows[0].rounds] == [False, True]
            assert found.rows[0].tokens == 1
    assert timeline([]) is None


#     root
#     0 ── 1 " a" ── 2 " b" ── 4 " d"
#      └── 3 " c"
TEXTS, PARENTS = ["", " a", " b", " c", " d"], [-1, 0, 1, 0, 2]


def test_answers_round_by_round() -> None:
    """Which draft was turned down, what is counted, and that answers to one question stand together."""
    for path, own, rejected in (
        ([0], " x", [" a", " b", " d"]),
        ([0, 1], " x", [" b", " d"]),
        ([0, 3], " x", []),
        ([0, 1], None, []),
    ):
        assert first_rejected(TracedRound(TEXTS, PARENTS, path, own)) == rejected
    rounds = [TracedRound(TEXTS, PARENTS, [0, 1, 2], " x"), TracedRound(TEXTS, PARENTS, [0, 3], None)]
    answer = TracedAnswer("tree@0", "parallel", 7, "math", "y" * (SHOWN_PROMPT_CHARS + 1), "The", rounds)
    (question,) = shown_answers([answer, replace(answer, arm="chain@0"), replace(answer, rounds=[])])
    assert question.prompt == "y" * SHOWN_PROMPT_CHARS + "…"
    assert [each.method for each in question.answers] == ["tree", "chain"]
    shown = question.answers[0]
    assert (shown.tokens, shown.drafted) == (4, 3)
    assert [(each.drafted, each.kept, each.own, each.nodes) for each in shown.rounds] == [
        (" a b", 2, " x", 4),
        (" c", 1, None, 4),
    ]
    assert shown.rounds[0].title == "round 1: 4 tokens drafted, 2 kept, then the target's ' x'; rejected: ' d'"
    assert shown.rounds[1].title == "round 2: 4 tokens drafted, 1 kept"


# ---- curves ----


@pytest.mark.parametrize(
    ("low", "high", "about", "values"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0.91, 2.68, 4, [1.0, 1.5, 2.0, 2.5]),
        (0, 1932, 4, [0, 500, 1000, 1500]),
        (-0.12, 2.12, 5, [0, 0.5, 1.0, 1.5, 2.0]),
        (3, 3, 5, [3]),
    ],
)
def test_round_values(low: float, high: float, about: int, values: list[float]) -> None:
    assert round_values(low, high, about) == pytest.approx(values)


def test_scales() -> None:
    scale = Scale(1.0, 3.0)
    assert [scale.percent(value) for value in (0.0, 1.0, 2.0, 3.0, 9.0)] == [0, 0, 50, 100, 100]
    assert scale.ticks(4) == [("1", 0), ("1.5", 25), ("2", 50), ("2.5", 75), ("3", 100)]
    assert scale_around([2.0], 2.0) == Scale(1.5, 2.5)


def test_lines_are_named_apart_and_long_ones_keep_their_ends() -> None:
    """Five that end at the same height, at the bottom of the picture: a line of text each, none below it."""
    left, right = curves.LEFT, curves.WIDTH - curves.RIGHT
    series = {str(n): [(0.0, 1.0), (10.0, 0.0)] for n in range(5)}
    chart = line_chart("t", "step", series, Scale(0, 10), Scale(0, 1))
    heights = sorted(label_y for _, _, label_y in chart.lines)
    assert all(b - a >= curves.LABEL_HEIGHT for a, b in pairwise(heights))
    assert heights[-1] <= curves.HEIGHT - curves.BOTTOM + curves.LABEL_HEIGHT
    assert chart.lines[0][1] == f"{left:g},{curves.TOP:g} {right:g},{curves.HEIGHT - curves.BOTTOM:g}"
    points = [(float(n), float(n % 7)) for n in range(1001)]
    ((_, line, _),) = line_chart("t", "step", {"a": points}, Scale(0, 1000), Scale(0, 7)).lines
    places = line.split(" ")
    assert len(places) <= curves.MOST_POINTS + 1
    assert places[0].startswith(f"{left:g},")
    assert places[-1].startswith(f"{right:g},")


def test_curves_of_theory() -> None:
    """gamma = 1 at alpha = 0.99 expects 1.99 tokens; dots carry the method's name where there is a figure."""
    charts = theory_charts([*TIMING, TIMING[0] | {"method": "x", "operations_measured": None}])
    assert [len(chart.lines) for chart in charts] == [5, 6, 5, 5]
    name, points, _ = charts[0].lines[0]
    height = curves.HEIGHT - curves.BOTTOM - curves.TOP
    expected = curves.HEIGHT - curves.BOTTOM - height * (1.99 - 1) / (curves.MOST_TIMES - 1)
    assert (name, float(points.split(",")[-1])) == ("γ=1", pytest.approx(expected, abs=0.1))
    assert [name for name, *_ in charts[0].dots] == ["tree at T = 0", "x at T = 0"]
    assert [name for name, *_ in charts[3].dots] == ["tree at T = 0"]
    # At alpha 0.71.
    left, right = curves.LEFT, curves.WIDTH - curves.RIGHT
    assert charts[0].dots[0][1] == pytest.approx(left + 0.71 * (right - left), abs=0.1)


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
    assert [name for name, *_ in found.charts[0].lines] == ["1", "2", "10"]
    assert training_curves({"run": Training(steps=30, history=[])}) == []


def test_held_out_figures_are_of_the_saved_weights() -> None:
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
    assert differing_settings([{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}]) == ["b"]
