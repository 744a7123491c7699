"""Figures of the summary: categories, the baseline's speed by hand, and the rows that documents quote."""

from dataclasses import replace
from typing import Any

import pytest
from support.report_facts import made_up, records_of

from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.eval.report.summary import (
    acceptance_by_depth,
    baseline_speeds,
    best_row,
    evaluation_figures,
    summarize,
)
from draftsmith.recipes.schema import Recipe


def test_tasks_come_from_the_question_file() -> None:
    """Tasks have equal weight, and several categories of one are shown only if there is no other task."""
    records = records_of({"chain": 1.0})
    for record, task in zip(records, ["math_500", "math_500", "gsm8k", "qualitative/rag"] * 2, strict=True):
        record.category, record.task = record.category if task == "math_500" else task, task
    *rows, overall = [row for row in summarize(records) if row["method"] == "chain"]
    assert [row["category"] for row in rows] == ["math_500", "gsm8k", "qualitative/rag"]
    assert overall["over_tasks"]["questions"] == {"math_500": 4, "gsm8k": 2, "qualitative/rag": 2}
    alone = summarize([record for record in records if record.task == "math_500"])
    assert list(dict.fromkeys(row["category"] for row in alone)) == ["writing", "math", "overall"]


def questions_read_in(*seconds: float | None) -> list[QuestionRecord]:
    """Questions after which 2,000,000 bytes were read in these seconds, or nothing."""
    records = [made_up(0, 2.0, 4.0) for _ in seconds]
    for record, read_s in zip(records, seconds, strict=True):
        if read_s is not None:
            record.weights_bytes, record.weights_read_s = 2_000_000, read_s
    return records


def test_baseline_bandwidth_by_hand() -> None:
    """2 MB in 1 ms are 2 GB/s; the median question read them in 0.5 ms, 4 GB/s."""
    step = {"temperature": 0.0, "timing": {"t_target_step_s": 0.001}}
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
    assert baseline_speeds(questions_read_in(0.001), [step | {"timing": {"t_target_step_s": 0.0}}]) == []


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


def test_pooled_and_by_question_by_hand() -> None:
    """5 and 10 tokens/s against 2.5 and 10: 20 tokens in 3 s against 5 s is 5/3; the means 7.5 against 6.25 are 1.2.

    The drafter's tau is 3 in 3 rounds and 9 in 1: 18 tokens in 4 rounds, or 6 by question.
    """
    records = [build_question(1, "qa", 2.0, 4.0, rounds=3), build_question(2, "qa", 1.0, 1.0, rounds=1)]
    row = summarize(records)[-1]
    assert (row["method"], row["category"]) == ("chain", "overall")
    assert (row["speedup_mean"], row["speedup_by_question_mean"]) == (pytest.approx(5 / 3), pytest.approx(1.2))
    assert (row["tau"], row["tau_by_question"]) == (4.5, 6)
    again = [
        replace(record, run=1)
        for record in (build_question(1, "qa", 1.0, 4.0, 3), build_question(2, "qa", 1.0, 1.0, 1))
    ]
    row = summarize([*records, *again])[-1]
    assert row["speedup_by_question_mean"] == pytest.approx(1.4)  # 1.2 and 1.6


def test_timing_by_hand() -> None:
    """t_target 0.2, t_draft 0.1, t_verify 0.2, tau 3: predicted 3 * 0.2 / 0.3 = 2; measured 4.5 / 2.5 = 1.8."""
    row = summarize([made_up(0, 2.5, 4.5)])[-1]["timing"]
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
    rows = evaluation_figures(Recipe(name="table"), summary, 3, None, [])["rows"]
    assert rows["chain@0"]["over_tasks"] == {
        "tasks": 2, "tau": pytest.approx(2.75), "speedup_mean": pytest.approx(1.5), "tau_interval": None,
        "speedup_interval": None, "questions": {"mt_bench": 2, "qa": 1},
    }  # fmt: skip
    assert rows["autoregressive@0"]["over_tasks"]["speedup_mean"] == pytest.approx(1.0)
    assert "over_tasks" not in rows["chain@0"]["by_category"]["qa"]
    alike = [build_question(n, ("qa", "math")[n % 2], 2.0, 2.0 + 2 * (n % 2), rounds=3) for n in range(6)]
    found = summarize(alike)[-1]["over_tasks"]
    assert (found["speedup_mean"], found["speedup_interval"]) == (pytest.approx(1.5), pytest.approx([1.5, 1.5]))
    assert summarize(alike[::2])[-1]["over_tasks"] is None
    longer = row("pooled", "overall", 4.0) | {"lossless": True, "over_tasks": {"speedup_mean": 1.2}}
    better = row("by task", "overall", 2.0) | {"lossless": True, "over_tasks": {"speedup_mean": 1.3}}
    assert best_row([longer, better]) is better
