"""An evaluation's figures under names of their own."""

from typing import Any

from draftsmith.eval.report.result import evaluation_figures
from draftsmith.recipes.schema import Recipe


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


def test_by_arm_with_categories_timing_and_seeds() -> None:
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
