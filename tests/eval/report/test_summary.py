"""Figures under names of their own: categories that count once, the baseline's speed by hand, what documents quote."""

from typing import Any

import pytest
from support.records import made_up
from support.report_facts import records_of
from support.report_facts import row as full_row

from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.eval.report.summary import (
    baseline_speeds,
    evaluation_figures,
    parts_of_mt_bench,
    shown_categories,
    summarize,
)
from draftsmith.recipes.schema import Recipe

EIGHT = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]


def test_no_category_twice() -> None:
    """writing and math are mt_bench where there are other tasks too, and then a table of their own."""
    summary = summarize(records_of({"chain": 1.0}))
    assert shown_categories(summary) == ["translation", "rag", "mt_bench"]
    assert parts_of_mt_bench(summary) == ["writing", "math"]
    tokens = {each["category"]: each["tokens"] for each in summary if each["method"] == "chain"}
    assert sum(tokens[name] for name in ("translation", "rag", "mt_bench")) == tokens["overall"] == 60
    alone = [full_row(method, category) for method in ("autoregressive", "x") for category in (*EIGHT, "overall")]
    assert shown_categories(alone) == EIGHT
    assert parts_of_mt_bench(alone) == []


def read_in(*seconds: float | None) -> list[QuestionRecord]:
    """Questions after which 2,000,000 bytes were read in so many seconds, or nothing."""
    records = [made_up(0, 2.0, 4.0) for _ in seconds]
    for record, read_s in zip(records, seconds, strict=True):
        if read_s is not None:
            record.weights_bytes, record.weights_read_s = 2_000_000, read_s
    return records


def test_a_step_of_twice_the_reads_time_reads_at_half_its_speed() -> None:
    """2 MB in 1 ms are 2 GB/s; the median question read them in 0.5 ms, which are 4."""
    step = {"temperature": 0.0, "t_target_step_s": 0.001}
    (found,) = baseline_speeds(read_in(0.0005, 0.0004, 0.01, None), [step])
    assert found == {
        "temperature": 0.0,
        "weights_bytes": 2_000_000,
        "step_s": 0.001,
        "step_bytes_per_s": pytest.approx(2e9),
        "read_bytes_per_s": pytest.approx(4e9),
        "share": pytest.approx(0.5),
    }
    assert baseline_speeds(read_in(None), [step]) == []
    assert baseline_speeds(read_in(0.001), [step | {"t_target_step_s": 0.0}]) == []


def row(method: str, category: str, tau: float, temperature: float = 0.0) -> dict[str, Any]:
    return {
        "method": method, "temperature": temperature, "category": category, "tau": tau, "tau_without_bonus": tau - 1,
        "speedup_mean": tau / 2, "speedup_std": None, "tokens": 100, "greedy_identical": True, "runs": 1,
        "different_answers": 0, "numerical_ties": 0,
    }  # fmt: skip


def test_each_task_counts_alike() -> None:
    """Two tasks of 2 and 4 tokens a round make 3, whatever the parts of the first and all questions together say."""
    summary = [
        row("a", "math", 9.0) | {"task": "mt_bench"}, row("a", "mt_bench", 2.0) | {"task": "mt_bench"},
        row("a", "qa", 4.0) | {"task": "qa"}, row("a", "overall", 2.1) | {"task": None},
    ]  # fmt: skip
    figures = evaluation_figures(Recipe(name="table"), summary, [], 26, None, [])
    assert figures["rows"]["a@0"]["over_tasks"] == {"tasks": 2, "tau": 3.0, "speedup_mean": 1.5}


def test_by_method_with_categories_timing_and_seeds() -> None:
    summary = [
        row("a/tree", "qa", 2.0), row("a/tree", "overall", 2.5), row("a/tree", "overall", 1.5, temperature=1.0),
        row("a-seed-1/tree", "qa", 3.0), row("a-seed-1/tree", "overall", 3.5),
    ]  # fmt: skip
    timing = [{"method": "a/tree", "temperature": 0.0, "loop_efficiency": 0.97}]
    recipe = Recipe(name="table", target={"model": "/tmp/weights", "gguf_file": "small.gguf"})  # type: ignore[arg-type]
    figures = evaluation_figures(recipe, summary, timing, 26, None, [{"temperature": 0.0, "share": 0.89}])
    assert list(figures["rows"]) == ["a/tree@0", "a/tree@1", "a-seed-1/tree@0"]
    tree = figures["rows"]["a/tree@0"]
    assert (tree["tau"], tree["by_category"]["qa"]["tau"], tree["timing"]["loop_efficiency"]) == (2.5, 2.0, 0.97)
    assert "runs" not in tree["by_category"]["qa"]
    assert "timing" not in figures["rows"]["a/tree@1"]
    assert (figures["over_seeds"]["a/tree@0"]["tau_mean"], figures["over_seeds"]["a/tree@0"]["seeds"]) == (3.0, 2)
    assert figures["baseline"] == [{"temperature": 0.0, "share": 0.89}]
    assert (figures["target"], figures["asked"], figures["settings"]["runs"]) == ("small.gguf", 26, 3)


def test_a_row_says_how_it_was_drafted() -> None:
    methods = [
        {"name": "chain", "drafter": "/home/someone/runs/mine/drafter"},
        {"name": "tree", "tree": "best_first", "nodes": 12, "branch": 4, "drafter": "someone/drafter@v1"},
        {"name": "bigram", "kind": "ngram", "options": {"n": 2}},
    ]
    recipe = Recipe(name="table", target={"model": "embedded"}, eval={"methods": methods})  # type: ignore[arg-type]
    assert evaluation_figures(recipe, [], [], 1, None, [])["methods"] == {
        "chain": {"drafter": "mine/drafter"},
        "tree": {"tree": "best_first", "nodes": 12, "branch": 4, "drafter": "someone/drafter@v1"},
        "bigram": {"kind": "ngram", "options": {"n": 2}},
    }
