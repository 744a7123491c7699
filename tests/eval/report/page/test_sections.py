"""Figures of the page's sections: order, places on scales, rounds, curves."""

from dataclasses import replace

import pytest
from support.report_facts import TIMING, records_of, row

from draftsmith.eval.bench.traced import SHOWN_PROMPT_CHARS, TracedAnswer, TracedRound, by_question
from draftsmith.eval.report.page.curves import (
    compared_drafters,
    training_curves,
)
from draftsmith.eval.report.page.methods import (
    MOST_DEPTHS,
    acceptance_depths,
    length_tables,
    mean_rounds,
    method_tables,
    timeline,
)
from draftsmith.eval.report.summary import acceptance_by_depth, summarize
from draftsmith.models.base.registry import Training
from draftsmith.recipes.schema import Recipe

# ---- methods next to each other ----


def test_methods_are_sorted_on_one_scale_with_the_baseline() -> None:
    """The scale is 0 to 2 with 6 % of that on both sides."""
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


def test_intervals_against_the_fastest_are_paired_by_question() -> None:
    """Twice the time on every question, also on different ones: 0.5 with zero width."""
    records = records_of({"fast": 0.5, "slow": 1.0}, (0.0, 1.0))
    cold, hot = method_tables(summarize(records), records)
    assert (cold.temperature, hot.temperature) == (0.0, 1.0)
    assert cold.against_best == {"fast@0": None, "slow@0": pytest.approx([0.5, 0.5])}
    assert method_tables(summarize(records))[0].against_best == {}


def test_acceptance_by_depth() -> None:
    """Ten rounds accepted 0 (5 times), 1 (3) and 2 (2) tokens: 5 of 10 accepted depth 1, 2 of 10 depth 2."""
    lengths = [0] * 5 + [1] * 3 + [2] * 2
    row = TIMING[0] | {"acceptance_by_depth": acceptance_by_depth(lengths)}
    (found,) = acceptance_depths([row, row | {"method": "autoregressive"}, row | {"acceptance_by_depth": []}])
    assert found.shares == [(0.5, 0.5), (pytest.approx(0.2), pytest.approx(0.4))]
    assert (found.tau_without_bonus, found.more) == (pytest.approx(sum(lengths) / len(lengths)), 0)
    rows = [
        row | {"method": "deep", "acceptance_by_depth": [0.9] * (MOST_DEPTHS + 3)},
        row | {"method": "seldom", "acceptance_by_depth": [0.001, 0.5, 0.5]},
        row | {"method": "hot", "temperature": 1.0, "acceptance_by_depth": [0.95]},
    ]
    listed = [(each.method, len(each.shares), each.more) for each in acceptance_depths(rows)]
    assert listed == [("deep", MOST_DEPTHS, 3), ("seldom", 1, 2), ("hot", 1, 0)]


def test_tau_by_length() -> None:
    """A column for every bucket of any method; a dash where a method has no rounds in it."""
    early, late = ({"from": low, "below": 2 * low or 16, "rounds": 5, "tau": 2.5} for low in (0, 32))
    rows = [
        row("chain", "overall", tau_by_context=[], tau_by_position=[early, late]),
        row("tree", "overall", tau_by_context=[], tau_by_position=[late]),
        row("autoregressive", "overall", tau_by_position=[early | {"from": 16, "below": 32}]),
        row("chain", "math"),
    ]
    (table,) = length_tables(rows)
    assert (table.tokens, table.buckets) == ("answer", ["below 16", "32 to 63"])
    assert [(each["method"], cells) for each, cells in table.rows] == [("chain", [early, late]), ("tree", [None, late])]
    assert length_tables([row("chain", "overall")]) == []


# ---- rounds ----


def test_mean_round() -> None:
    """1 + 4.5 + 0.2 + 0.123 ms for 2.5 tokens; the longest bar is 98 % wide. The cheapest token comes first."""
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


def test_timeline() -> None:
    """The time axis ends with the chain's three rounds of 80 ms: 240 ms, in which the baseline has four steps."""
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


#     root
#     0 ── 1 " a" ── 2 " b" ── 4 " d"
#      └── 3 " c"
TEXTS, PARENTS = ["", " a", " b", " c", " d"], [-1, 0, 1, 0, 2]


def test_answers_round_by_round() -> None:
    """Rejected drafts are marked, tokens are counted, and answers to one question stand together."""
    for path, own, rejected in (
        ([0], " x", [" a", " b", " d"]),
        ([0, 1], " x", [" b", " d"]),
        ([0, 3], " x", []),
        ([0, 1], None, []),
    ):
        assert TracedRound(TEXTS, PARENTS, path, own).rejected == rejected
    rounds = [TracedRound(TEXTS, PARENTS, [0, 1, 2], " x"), TracedRound(TEXTS, PARENTS, [0, 3], None)]
    answer = TracedAnswer("tree@0", "parallel", 7, "math", "y" * (SHOWN_PROMPT_CHARS + 1), "The", rounds)
    (question,) = by_question([answer, replace(answer, arm="chain@0"), replace(answer, rounds=[])])
    assert [each.method for each in question] == ["tree", "chain"]
    shown = question[0]
    assert shown.shown_prompt == "y" * SHOWN_PROMPT_CHARS + "…"
    assert (shown.tokens, shown.drafted) == (4, 3)
    assert [(each.drafted, each.num_accepted) for each in shown.rounds] == [(" a b", 2), (" c", 1)]
    assert rounds[0].title(1) == "round 1: 4 tokens drafted, 2 kept, then the target's ' x'; rejected: ' d'"
    assert rounds[1].title(2) == "round 2: 4 tokens drafted, 1 kept"


# ---- curves ----


HISTORY = [
    {"step": 10, "loss": 2.0, "accuracy_depth1": 0.3, "accuracy_depth2": 0.1, "accuracy_depth10": 0.0},
    {"step": 20, "loss": 1.0, "accuracy_depth1": 0.5, "accuracy_depth2": 0.2, "accuracy_depth10": 0.1},
    {"step": 20, "eval_loss": 1.5, "eval_accuracy_depth1": 0.4, "eval_tau_depth1": 1.4},
    {"step": 30, "eval_loss": 1.7, "eval_accuracy_depth1": 0.35, "eval_tau_depth1": 1.3},
    {"train_runtime": 5.0},
]


def test_held_out_figures_belong_to_the_saved_weights() -> None:
    for best, step, tau in ((20, 20, 1.4), (None, 30, 1.3)):
        (found,) = training_curves({"run": Training(steps=30, history=HISTORY, best_step=best)})
        assert found.held_out is not None
        assert (found.held_out.step, found.held_out.tau) == (step, [tau])
    (found,) = training_curves({"run": Training(steps=30, history=HISTORY[:2])})
    assert found.held_out is None


def test_compared_drafters() -> None:
    """Each has its fastest method at the lowest temperature, and the settings in which they differ."""
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
