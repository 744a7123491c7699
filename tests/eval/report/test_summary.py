"""Figures of the summary: categories, the baseline's speed by hand, and the rows that documents quote."""

from dataclasses import replace
from typing import Any

import pytest
from support.records import made_up
from support.report_facts import records_of
from support.report_facts import row as full_row

from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.eval.decoding.generate import AnswerRecord
from draftsmith.eval.report.summary import (
    acceptance_by_depth,
    baseline_speeds,
    best_row,
    evaluation_figures,
    parts_of_tasks,
    shown_categories,
    summarize,
    summarize_timing,
    tau_by_length,
)
from draftsmith.recipes.schema import Recipe

EIGHT = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]


def test_no_category_is_counted_twice() -> None:
    """writing and math belong to mt_bench if there are other tasks too, and then have a separate table."""
    summary = summarize(records_of({"chain": 1.0}))
    assert shown_categories(summary) == ["translation", "rag", "mt_bench"]
    assert parts_of_tasks(summary) == ["writing", "math"]
    tokens = {each["category"]: each["tokens"] for each in summary if each["method"] == "chain"}
    assert sum(tokens[name] for name in ("translation", "rag", "mt_bench")) == tokens["overall"] == 80
    assert {each["category"]: each["task"] for each in summary} == {
        "writing": "mt_bench", "math": "mt_bench", "mt_bench": "mt_bench", "translation": "translation", "rag": "rag",
        "overall": None,
    }  # fmt: skip
    alone = [full_row(method, category) for method in ("autoregressive", "x") for category in (*EIGHT, "overall")]
    assert shown_categories(alone) == EIGHT
    assert parts_of_tasks(alone) == []


@pytest.mark.parametrize(
    ("tasks", "shown", "parts", "questions"),
    [
        (
            ["writing", "math", "translation", "rag"], ["writing", "math", "translation", "rag"], [],
            {"writing": 2, "math": 2, "translation": 2, "rag": 2},
        ),
        (
            ["math_500", "math_500", "gsm8k", "qualitative/rag"], ["gsm8k", "qualitative/rag", "math_500"],
            ["writing", "math"], {"math_500": 4, "gsm8k": 2, "qualitative/rag": 2},
        ),
    ],
)  # fmt: skip
def test_tasks_come_from_the_question_file(
    tasks: list[str], shown: list[str], parts: list[str], questions: dict[str, int]
) -> None:
    """Tasks have equal weight; one of several categories is joined, as MATH-500's subjects next to another set."""
    records = records_of({"chain": 1.0})
    for record, task in zip(records, tasks * 2, strict=True):
        record.category, record.task = record.category if task == "math_500" else task, task
    summary = summarize(records)
    assert (shown_categories(summary), parts_of_tasks(summary)) == (shown, parts)
    assert summary[-1]["over_tasks"]["questions"] == questions


def questions_read_in(*seconds: float | None) -> list[QuestionRecord]:
    """Questions after which 2,000,000 bytes were read in these seconds, or nothing."""
    records = [made_up(0, 2.0, 4.0) for _ in seconds]
    for record, read_s in zip(records, seconds, strict=True):
        if read_s is not None:
            record.weights_bytes, record.weights_read_s = 2_000_000, read_s
    return records


def test_baseline_bandwidth_by_hand() -> None:
    """2 MB in 1 ms are 2 GB/s; the median question read them in 0.5 ms, 4 GB/s."""
    step = {"temperature": 0.0, "t_target_step_s": 0.001}
    (found,) = baseline_speeds(questions_read_in(0.0005, 0.0004, 0.01, None), [step])
    assert found == {
        "temperature": 0.0,
        "weights_bytes": 2_000_000,
        "step_s": 0.001,
        "step_bytes_per_s": pytest.approx(2e9),
        "read_bytes_per_s": pytest.approx(4e9),
        "share": pytest.approx(0.5),
    }
    assert baseline_speeds(questions_read_in(None), [step]) == []
    assert baseline_speeds(questions_read_in(0.001), [step | {"t_target_step_s": 0.0}]) == []


# ---- figures by hand ----


def test_speedup_by_hand() -> None:
    """Run 0: 4 s / 2 s = 2; run 1: 6 s / 2 s = 3; mean 2.5, standard deviation sqrt(0.5)."""
    rows = summarize([made_up(0, 2.0, 4.0), made_up(1, 2.0, 6.0, same=False)])
    row = next(row for row in rows if (row["method"], row["category"]) == ("chain", "overall"))
    assert row["speedup_mean"] == pytest.approx(2.5)
    assert row["speedup_std"] == pytest.approx(0.5**0.5)
    assert (row["tau"], row["tau_without_bonus"], row["tokens"], row["runs"]) == (3, 2, 20, 2)
    assert (row["greedy_identical"], row["different_answers"], row["numerical_ties"]) == (False, 1, 0)
    assert summarize([made_up(0, 2.0, 4.0)])[-1]["speedup_std"] is None


def build_question(number: int, category: str, seconds: float, baseline_seconds: float, rounds: int) -> QuestionRecord:
    """Build an answer of 10 tokens, the last 9 in this number of rounds."""
    record = replace(made_up(0, seconds, baseline_seconds), question_id=number, category=category)
    (answer,) = record.answers["chain@0"].turns
    answer.accept_lengths, answer.draft_lengths = [9 // rounds] * rounds, [9 // rounds - 1] * rounds
    answer.round_s, answer.draft_depths = [0.1] * rounds, [2] * rounds
    return record


def test_draft_vocabulary_figures_by_hand() -> None:
    """Three rounds of three tokens; two tokens are outside, one after two of four accepted draft tokens."""
    record = made_up(0, 2.0, 4.0)
    (turn,) = record.answers["chain@0"].turns
    turn.draft_depths, turn.outside_tokens, turn.ended_outside = [4, 4, 4], 2, [1]
    baseline, chain = (summarize([record])[index] for index in (1, -1))
    assert chain["decoded_coverage"] == pytest.approx(7 / 9)
    assert chain["rounds_ended_outside"] == pytest.approx(1 / 3)
    assert chain["tau_lost_at_most"] == pytest.approx(2 / 3)
    assert baseline["method"] == "autoregressive"
    assert baseline["decoded_coverage"] is None


def test_tau_by_length_by_hand() -> None:
    """Rounds after 1, 11, 16, 18 and 38 tokens of an answer to 120; and after 1 of one to 7."""
    turns = [
        AnswerRecord(accept_lengths=lengths, prompt_tokens=prompt)
        for lengths, prompt in (([10, 5, 2, 20, 1], 120), ([4], 7))
    ]
    assert tau_by_length(turns) == {
        "tau_by_context": [
            {"from": 0, "below": 128, "rounds": 2, "tau": 7},
            {"from": 128, "below": 256, "rounds": 4, "tau": 7},
        ],
        "tau_by_position": [
            {"from": 0, "below": 16, "rounds": 3, "tau": pytest.approx(19 / 3)},
            {"from": 16, "below": 32, "rounds": 2, "tau": 11},
            {"from": 32, "below": 64, "rounds": 1, "tau": 1},
        ],
    }
    category, overall = summarize([made_up(0, 2.0, 4.0), made_up(1, 2.0, 4.0)])[-2:]
    assert "tau_by_context" not in category
    # Three rounds a run, after 127, 130 and 133 tokens.
    assert [(each["from"], each["rounds"]) for each in overall["tau_by_context"]] == [(0, 2), (128, 4)]


def test_pooled_and_by_question_by_hand() -> None:
    """5 and 10 tokens/s against 2.5 and 10: 20 tokens in 3 s against 5 s is 5/3; the means 7.5 against 6.25 are 1.2.

    The drafter's tau is 3 in 3 rounds and 9 in 1: 18 tokens in 4 rounds, or 6 by question.
    """
    records = [build_question(1, "qa", 2.0, 4.0, rounds=3), build_question(2, "qa", 1.0, 1.0, rounds=1)]
    row = summarize(records)[-1]
    assert (row["method"], row["category"], row["task"]) == ("chain", "overall", None)
    assert (row["speedup_mean"], row["speedup_by_question_mean"]) == (pytest.approx(5 / 3), pytest.approx(1.2))
    assert (row["tau"], row["tau_by_question"]) == (4.5, 6)
    assert row["speedup_by_question_std"] is None
    again = [
        replace(record, run=1)
        for record in (build_question(1, "qa", 1.0, 4.0, 3), build_question(2, "qa", 1.0, 1.0, 1))
    ]
    row = summarize([*records, *again])[-1]
    assert row["speedup_by_question_mean"] == pytest.approx(1.4)  # 1.2 and 1.6
    assert row["speedup_by_question_std"] == pytest.approx(0.2 * 2**0.5)


def test_timing_by_hand() -> None:
    """t_target 0.2, t_draft 0.1, t_verify 0.2, tau 3: predicted 3 * 0.2 / 0.3 = 2; measured 4.5 / 2.5 = 1.8."""
    row = summarize_timing([made_up(0, 2.5, 4.5)])[-1]
    assert row["speedup_predicted"] == pytest.approx(2.0)
    assert row["speedup_decoding"] == pytest.approx(1.8)
    assert row["loop_efficiency"] == pytest.approx(0.9)
    assert row["cost_ratio"] == pytest.approx(0.5)
    assert (row["t_choose_s"], row["t_commit_s"]) == (pytest.approx(0.03), pytest.approx(0.04))
    assert acceptance_by_depth([0, 1, 2, 2]) == [0.75, pytest.approx(2 / 3)]


# ---- rows that documents quote ----


def row(method: str, category: str, tau: float, temperature: float = 0.0) -> dict[str, Any]:
    return {
        "method": method, "temperature": temperature, "category": category, "tau": tau, "tau_without_bonus": tau - 1,
        "speedup_mean": tau / 2, "speedup_std": None, "tokens": 100, "greedy_identical": True, "runs": 1,
        "different_answers": 0, "numerical_ties": 0,
    }  # fmt: skip


def test_tasks_have_equal_weight() -> None:
    """MT-bench commits 36 tokens in 8 rounds, with 10 s against 5 s: 4.5 and 2; QA 1 and 1: means of 2.75 and 1.5.

    Both runs are pooled within a task: the mean of their speedups, 5/3 and 5/2, is not 2. One question of a task has no
    interval; with two of each, all equal, it has no width.
    """
    records = [
        replace(question, run=run)
        for run, seconds in enumerate((2.0, 1.0))
        for question in (
            build_question(1, "math", seconds, 4.0, 3), build_question(2, "writing", 1.0, 1.0, 1),
            build_question(3, "qa", 5.0, 5.0, 9),
        )
    ]  # fmt: skip
    summary = summarize(records)
    rows = evaluation_figures(Recipe(name="table"), summary, [], 3, None, [])["rows"]
    assert rows["chain@0"]["over_tasks"] == {
        "tasks": 2, "tau": pytest.approx(2.75), "speedup_mean": pytest.approx(1.5), "tau_interval": None,
        "speedup_interval": None, "questions": {"mt_bench": 2, "qa": 1},
    }  # fmt: skip
    assert rows["autoregressive@0"]["over_tasks"]["speedup_mean"] == pytest.approx(1.0)
    assert "over_tasks" not in rows["chain@0"]["by_category"]["math"]
    alike = [build_question(n, ("qa", "math")[n % 2], 2.0, 2.0 + 2 * (n % 2), rounds=3) for n in range(6)]
    found = summarize(alike)[-1]["over_tasks"]
    assert (found["speedup_mean"], found["speedup_interval"]) == (pytest.approx(1.5), pytest.approx([1.5, 1.5]))
    assert summarize(alike[::2])[-1]["over_tasks"] is None
    longer = row("pooled", "overall", 4.0) | {"lossless": True, "over_tasks": {"speedup_mean": 1.2}}
    better = row("by task", "overall", 2.0) | {"lossless": True, "over_tasks": {"speedup_mean": 1.3}}
    assert best_row([longer, better]) is better


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
    over_seeds = {"tau_mean": 3.0, "tau_std": 0.5**0.5, "speedup_mean": 1.5, "speedup_std": 0.125**0.5, "seeds": 2}
    assert figures["over_seeds"] == {
        "a/tree@0": {"method": "a/tree", "temperature": 0.0} | {k: pytest.approx(v) for k, v in over_seeds.items()}
    }
    assert figures["baseline"] == [{"temperature": 0.0, "share": 0.89}]
    assert (figures["target"], figures["asked"], figures["settings"]["runs"]) == ("small.gguf", 26, 3)


def test_rows_record_the_method_settings() -> None:
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
