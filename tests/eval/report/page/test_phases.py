"""The time of rounds: bars add up, and the timeline shows the readings that the loop took, not more."""

from dataclasses import replace

import pytest
from support.report_facts import TIMING, records_of

from draftsmith.eval.report.page.phases import mean_rounds, timeline


def test_the_mean_round() -> None:
    """1 + 4.5 + 0.2 + 0.123 ms, for 2.5 tokens; the longest fills the picture but for 2 %."""
    (found,) = mean_rounds(TIMING)
    (row,) = found.rows
    assert row.round_s == pytest.approx(0.005823)
    assert row.per_token_s == pytest.approx(0.005823 / 2.5)
    assert [part.phase for part in row.parts] == ["draft", "forward", "choose", "commit"]
    assert [part.width for part in row.parts] == [
        pytest.approx(100 * each / 5.823 / 1.02, abs=0.02) for each in (1, 4.5, 0.2, 0.123)
    ]
    assert row.parts[-1].start + row.parts[-1].width == pytest.approx(100 / 1.02, abs=0.02)
    assert found.target == pytest.approx(100 * 4 / 5.823 / 1.02, abs=0.01)


def test_least_time_per_token_first() -> None:
    rows = [TIMING[0] | {"method": "good", "tau": 3.0}, TIMING[0] | {"method": "better", "tau": 4.0}]
    assert [row.method for row in mean_rounds(rows)[0].rows] == ["better", "good"]


def test_the_timeline() -> None:
    """Readings go as far as the chain's three rounds of 80 ms: 240 ms, in which the baseline steps four times."""
    found = timeline(records_of({"chain": 1.0}, (0.0, 1.0)))
    assert found is not None
    assert (found.temperature, found.scale.high) == (0.0, pytest.approx(240.0))
    baseline, chain = found.rows
    assert (baseline.method, baseline.tokens, len(baseline.rounds)) == ("autoregressive", 4, 4)
    assert (chain.method, chain.tokens) == ("chain", 9)
    assert [round_.tokens for round_ in chain.rounds] == [3, 3, 3]
    first = chain.rounds[0].parts
    assert [(part.phase, part.start, part.width) for part in first] == [
        ("draft", 0.0, pytest.approx(8.33)),
        ("forward", pytest.approx(8.33), pytest.approx(20.84)),
        ("choose", pytest.approx(29.17), pytest.approx(2.08)),
        ("commit", pytest.approx(31.25), pytest.approx(2.08)),
    ]
    assert chain.rounds[1].parts[0].start == pytest.approx(100 / 3, abs=0.01)


def test_a_round_that_goes_on_is_cut_and_not_counted() -> None:
    """A method whose one reading lasts 100 ms ends the picture in the second step of the baseline."""
    records = records_of({"chain": 1.0})
    for record in records:
        turn = record.answers["chain@0"].turns[0]
        record.answers["chain@0"].turns[0] = replace(turn, phases_s=[[0.1, 0.0, 0.0, 0.0]])
    found = timeline(records)
    assert found is not None
    assert [round_.cut for round_ in found.rows[0].rounds] == [False, True]
    assert found.rows[0].tokens == 1


def test_records_of_earlier_versions_have_no_timeline() -> None:
    records = records_of({"chain": 1.0})
    for record in records:
        turn = record.answers["chain@0"].turns[0]
        record.answers["chain@0"].turns[0] = replace(turn, phases_s=[])
    assert timeline(records) is None
    assert timeline([]) is None
