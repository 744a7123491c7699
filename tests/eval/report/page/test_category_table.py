"""Every question is in exactly one column beside `overall`, and tints say no more than the intervals."""

import pytest
from support.report_facts import SUMMARY, records_of, row

from draftsmith.eval.report.categories import parts_of_mt_bench, shown_categories
from draftsmith.eval.report.page.category_table import category_tables, mt_bench_tables, tint
from draftsmith.eval.report.summary import summarize

EIGHT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def test_no_category_twice() -> None:
    """writing and math are mt_bench where there are other tasks too, and then a table of their own."""
    summary = summarize(records_of({"chain": 1.0}))
    assert shown_categories(summary) == ["translation", "rag", "mt_bench"]
    assert parts_of_mt_bench(summary) == ["writing", "math"]
    (table,) = category_tables(summary)
    assert table.categories == ["translation", "rag", "mt_bench", "overall"]
    cells = dict(table.rows)["chain"]
    tokens = [cell.row["tokens"] for cell in cells if cell is not None]
    assert sum(tokens[:-1]) == tokens[-1] == 60
    (parts,) = mt_bench_tables(summary)
    assert parts.categories == ["writing", "math"]


def test_mt_bench_alone_shows_its_categories() -> None:
    """As the eight are all there is, their task would be `overall` once more."""
    summary = [row(method, category) for method in ("autoregressive", "x") for category in (*EIGHT, "overall")]
    assert shown_categories(summary) == list(EIGHT)
    assert parts_of_mt_bench(summary) == []
    assert mt_bench_tables(summary) == []
    (table,) = category_tables(summary)
    assert table.categories == [*EIGHT, "overall"]


def test_a_row_a_method_the_fastest_first() -> None:
    (table,) = category_tables([*SUMMARY, row("late", "overall", speedup_mean=5.0)])
    assert [name for name, _ in table.rows] == ["late", "tree", "chain"]
    assert [cell is None for cell in table.rows[0][1]] == [True, True, False]


@pytest.mark.parametrize(
    ("speedup", "ends", "expected"),
    [
        (0.9, None, "slow"), (0.9, [0.8, 0.95], "slow"), (1.1, [0.9, 1.3], "plain"), (0.95, [0.9, 1.3], "plain"),
        (1.1, None, "level-1"), (1.25, None, "level-2"), (1.6, [1.1, 2.0], "level-3"), (2.0, None, "level-4"),
        (7.0, None, "level-5"),
    ],
)  # fmt: skip
def test_tints(speedup: float, ends: list[float] | None, expected: str) -> None:
    assert tint(row("x", "math", speedup_mean=speedup, speedup_interval=ends)) == expected
