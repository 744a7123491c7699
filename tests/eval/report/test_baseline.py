"""How good the baseline is, by hand, and where a reader is told."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.records import made_up
from support.report_facts import SUMMARY, facts

from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.eval.report.baseline import baseline_sentences, baseline_speeds
from draftsmith.eval.report.page.forms import write_report
from draftsmith.eval.report.report import print_table

SLOWNESS = "Part of any speedup here is the baseline's slowness"


def read_in(*seconds: float | None) -> list[QuestionRecord]:
    """Questions after which 2,000,000 bytes were read in so many seconds, or nothing."""
    records = [made_up(0, 2.0, 4.0) for _ in seconds]
    for record, read_s in zip(records, seconds, strict=True):
        if read_s is not None:
            record.weights_bytes, record.weights_read_s = 2_000_000, read_s
    return records


def steps(*seconds: float) -> list[dict[str, Any]]:
    return [{"temperature": float(number), "t_target_step_s": each} for number, each in enumerate(seconds)]


def test_a_step_of_twice_the_reads_time_reads_at_half_its_speed() -> None:
    """2 MB in 1 ms are 2 GB/s; the median question read them in 0.5 ms, which are 4."""
    (row,) = baseline_speeds(read_in(0.0005, 0.0004, 0.01, None), steps(0.001))
    assert row == {
        "temperature": 0.0,
        "weights_bytes": 2_000_000,
        "step_s": 0.001,
        "step_bytes_per_s": pytest.approx(2e9),
        "read_bytes_per_s": pytest.approx(4e9),
        "share": pytest.approx(0.5),
    }
    (said,) = baseline_sentences([row])
    assert said.startswith("The baseline's step reads 2.0 of 4.0 GB/s (50 %). " + SLOWNESS)


def test_a_good_baseline_is_no_reason_for_a_speedup() -> None:
    """0.9 and 1.1 of the read's speed, the other way round in time: weights in caches may be read faster yet."""
    rows = baseline_speeds(read_in(0.0009), steps(0.001, 0.00081818))
    assert baseline_sentences(rows) == [
        "At T = 0 the baseline's step reads 2.0 of 2.2 GB/s (90 %).",
        "At T = 1 the baseline's step reads 2.4 of 2.2 GB/s (110 %).",
    ]
    edge = [{"temperature": 0.0, "step_bytes_per_s": 7e8, "read_bytes_per_s": 1e9, "share": 0.7}]
    assert baseline_sentences(edge) == ["The baseline's step reads 0.700 of 1.0 GB/s (70 %)."]
    assert SLOWNESS in baseline_sentences([edge[0] | {"share": 0.69}])[0]


def test_nothing_is_told_of_records_without_it() -> None:
    assert baseline_speeds(read_in(None), steps(0.001)) == []
    assert baseline_speeds(read_in(0.001), steps(0.0)) == []


@pytest.mark.parametrize(("step_s", "figures", "slow"), [(0.001, "2.0 of 4.0 GB/s (50 %)", True),
                                                        (0.00055556, "3.6 of 4.0 GB/s (90 %)", False)])  # fmt: skip
def test_it_stands_in_every_report(step_s: float, figures: str, slow: bool, tmp_path: Path) -> None:
    rows = baseline_speeds(read_in(0.0005), steps(step_s))
    markdown, html = write_report(tmp_path, facts(SUMMARY) | {"baseline": rows}, [])
    console = Console(record=True, width=400)
    print_table(SUMMARY, console, rows)
    first_screen = html.read_text().split("<nav")[0].replace("&#39;", "'")
    for text in (markdown.read_text(), first_screen, console.export_text()):
        assert f"The baseline's step reads {figures}." in text
        assert (SLOWNESS in text) == slow
    assert "bytes of the target's weights over the time of its step" in markdown.read_text()


def test_reports_of_earlier_records_say_nothing_of_it(tmp_path: Path) -> None:
    console = Console(record=True, width=400)
    print_table(SUMMARY, console)
    files = write_report(tmp_path, facts(SUMMARY), [])
    for text in (*(file.read_text() for file in files), console.export_text()):
        assert "GB/s" not in text
        assert "baseline's step" not in text


def test_where_only_the_baseline_was_measured_it_is_told_too(tmp_path: Path) -> None:
    rows = baseline_speeds(read_in(0.0005), steps(0.001))
    for file in write_report(tmp_path, facts(SUMMARY[:3]) | {"timing": [], "baseline": rows}, []):
        assert "reads 2.0 of 4.0 GB/s (50 %)" in file.read_text()
