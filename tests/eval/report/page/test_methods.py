"""Methods beside each other: order, places on the common scale, and the paired comparison with the fastest."""

import pytest
from support.report_facts import records_of, row

from draftsmith.eval.report.page.methods import method_tables
from draftsmith.eval.report.summary import summarize


def test_order_scale_and_baseline() -> None:
    rows = [
        row("autoregressive", "overall", tokens_per_s=20.0, speedup_mean=1.0),
        row("slow", "overall", speedup_mean=0.5, speedup_interval=[0.0, 0.9]),
        row("fast", "overall", speedup_mean=1.5, speedup_interval=[1.0, 2.0]),
        row("fast", "math", speedup_mean=9.0, speedup_interval=[8.0, 10.0]),
    ]
    (table,) = method_tables(rows)
    assert [each.row["method"] for each in table.rows] == ["fast", "slow"]
    assert [each.word for each in table.rows] == ["no gain", "SLOWER"]
    assert table.baseline_tokens_per_s == 20.0
    # From 0 to 2 with 6 % of it on both sides: 1 is in the middle.
    assert (table.scale.low, table.scale.high) == pytest.approx((-0.12, 2.12))
    assert table.one == 50.0
    fast = table.rows[0]
    assert (fast.low, fast.at) == (50.0, pytest.approx(100 * 1.62 / 2.24, abs=0.01))
    assert method_tables(rows[:1]) == []


def test_against_the_fastest_is_paired_by_question() -> None:
    """Twice the time on every question, however unlike these are: 0.5 without any width."""
    records = records_of({"fast": 0.5, "slow": 1.0}, (0.0, 1.0))
    cold, hot = method_tables(summarize(records), records)
    assert (cold.temperature, hot.temperature) == (0.0, 1.0)
    assert cold.rows[0].against_best is None
    assert cold.rows[1].against_best == pytest.approx([0.5, 0.5])
    assert method_tables(summarize(records))[0].rows[1].against_best is None
