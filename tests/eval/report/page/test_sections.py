"""Figures of the page's sections: order and places on scales."""

import pytest
from support.report_facts import TIMING, records_of, row

from draftsmith.eval.report.page.comparisons import (
    MOST_DEPTHS,
    acceptance_depths,
    method_tables,
)
from draftsmith.eval.report.summary import acceptance_by_depth, summarize


def test_methods_are_sorted_on_one_scale_with_the_baseline() -> None:
    """The scale is 0 to 2 with 6 % of that on both sides."""
    rows = [
        row("autoregressive", "overall", tokens_per_s=20.0, speedup_mean=1.0),
        row("slow", "overall", speedup_mean=0.5, speedup_interval=[0.0, 0.9]),
        row("fast", "overall", speedup_mean=1.5, speedup_interval=[1.0, 2.0]),
        row("fast", "math", speedup_mean=9.0, speedup_interval=[8.0, 10.0]),
    ]
    (table,) = method_tables(rows)
    assert [each["method"] for each in table["rows"]] == ["fast", "slow"]
    assert table["baseline_tokens_per_s"] == 20.0
    assert (table["scale"].low, table["scale"].high) == pytest.approx((-0.12, 2.12))
    assert table["scale"].percent(1.5) == pytest.approx(100 * 1.62 / 2.24, abs=0.01)
    assert method_tables(rows[:1]) == []


def test_intervals_against_the_fastest_are_paired_by_question() -> None:
    """Twice the time on every question, also on different ones: 0.5 with zero width."""
    records = records_of({"fast": 0.5, "slow": 1.0}, (0.0, 1.0))
    cold, hot = method_tables(summarize(records), records)
    assert (cold["temperature"], hot["temperature"]) == (0.0, 1.0)
    assert cold["against_best"] == {"fast@0": None, "slow@0": pytest.approx([0.5, 0.5])}


def test_acceptance_by_depth() -> None:
    """Ten rounds accepted 0 (5 times), 1 (3) and 2 (2) tokens: 5 of 10 accepted depth 1, 2 of 10 depth 2."""
    lengths = [0] * 5 + [1] * 3 + [2] * 2
    row = TIMING[0] | {"acceptance_by_depth": acceptance_by_depth(lengths)}
    (found,) = acceptance_depths([row, row | {"method": "autoregressive"}, row | {"acceptance_by_depth": []}])
    assert found["shares"] == [(0.5, 0.5), (pytest.approx(0.2), pytest.approx(0.4))]
    assert (found["tau_without_bonus"], found["more"]) == (pytest.approx(sum(lengths) / len(lengths)), 0)
    rows = [
        row | {"method": "deep", "acceptance_by_depth": [0.9] * (MOST_DEPTHS + 3)},
        row | {"method": "seldom", "acceptance_by_depth": [0.001, 0.5, 0.5]},
        row | {"method": "hot", "temperature": 1.0, "acceptance_by_depth": [0.95]},
    ]
    listed = [(each["method"], len(each["shares"]), each["more"]) for each in acceptance_depths(rows)]
    assert listed == [("deep", MOST_DEPTHS, 3), ("seldom", 1, 2), ("hot", 1, 0)]
