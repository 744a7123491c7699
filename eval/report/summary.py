"""From the harness's records to numbers: tau, speedup and its spread, greedy identity, and where the time went.

tau                  tokens kept per round, the target's own included (the paper's acceptance length), over all rounds
tau_by_question      mean over questions of the tau of each
tau_without_bonus    drafted tokens kept per round
speedup of a run     (tokens / s of the method) / (tokens / s of the autoregressive loop), same questions, same
                     process, prefill included on both sides; mean and standard deviation are over the runs. Pooled:
                     all tokens / all seconds
speedup_by_question  the same, with means over questions of each one's tokens / s (Spec-Bench, evaluation/speed.py,
                     whose "mean accepted tokens" are the pooled tau). Short answers count more here, long ones above
tokens per second    prefill included; first token: seconds from the prompt to the first token, median over turns
latency              seconds between tokens as a user sees them: see `latency_percentiles`
t_draft, ...         seconds of a round's phases (see `AnswerRecord`), medians over questions of means over rounds
loop efficiency      measured decoding speedup / (tau * t_target_step / (t_draft + t_verify_forward)): what is lost
                     in the loop's own Python; decoding = without the prefill
cost ratio           t_draft / t_target_step, of a whole round

What theory makes of these figures is in `theory_table.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

from draftsmith.data.sources.questions import MT_BENCH, task_of
from draftsmith.eval.bench.fair_clock import Answer, Record, check_fair_clock
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report.theory_table import theory_row

OVERALL = "overall"


def summarize(records: list[Record]) -> list[dict[str, Any]]:
    """One row for each method, temperature and category; Spec-Bench's task `mt_bench` and `overall` included.

    Raises:
        UserError: There is no record, or one compares what cannot be compared.
    """
    check_fair_clock(records)
    categories = list(dict.fromkeys(record["category"] for record in records))
    together = [category for category in categories if task_of(category) == MT_BENCH]
    if 1 < len(together) < len(categories) and MT_BENCH not in categories:
        categories.append(MT_BENCH)
    return [
        _row(_pairs(records, key, category), category)
        for key in records[0]["answers"]
        for category in [*categories, OVERALL]
    ]


Pair = tuple[int, Answer, Answer]  # run, the method's answer, the baseline's answer


def _pairs(records: list[Record], key: str, category: str) -> list[Pair]:
    pairs = []
    for record in records:
        if category in (OVERALL, record["category"], task_of(record["category"])):
            answer = record["answers"][key]
            baseline = record["answers"][f"{AUTOREGRESSIVE}@{answer['temperature']:g}"]
            pairs.append((record["run"], answer, baseline))
    return pairs


def _row(pairs: list[Pair], category: str) -> dict[str, Any]:
    answers = [answer for _, answer, _ in pairs]
    rounds = sum(len(answer["accept_lengths"]) for answer in answers)
    runs = sorted({run for run, _, _ in pairs})
    speedups, by_question = [], []
    for run in runs:
        of_run = [(answer, baseline) for number, answer, baseline in pairs if number == run]
        speedups.append(_speed(answer for answer, _ in of_run) / _speed(baseline for _, baseline in of_run))
        speeds = [(_speed([answer]), _speed([baseline])) for answer, baseline in of_run]
        by_question.append(sum(mine for mine, _ in speeds) / sum(base for _, base in speeds))
    taus = [statistics.fmean(answer["accept_lengths"]) for answer in answers if answer["accept_lengths"]]
    # Records older than lenience have none.
    lossless = answers[0].get("lenience", 1.0) == 1
    greedy = answers[0]["temperature"] == 0 and lossless
    return {
        "method": answers[0]["method"],
        "temperature": answers[0]["temperature"],
        "category": category,
        "task": None if category == OVERALL else task_of(category),
        "tau": sum(sum(answer["accept_lengths"]) for answer in answers) / rounds if rounds else None,
        "tau_by_question": statistics.fmean(taus) if taus else None,
        "tau_without_bonus": sum(sum(answer["draft_lengths"]) for answer in answers) / rounds if rounds else None,
        "speedup_mean": statistics.fmean(speedups),
        "speedup_std": statistics.stdev(speedups) if len(speedups) > 1 else None,
        "speedup_by_question_mean": statistics.fmean(by_question),
        "speedup_by_question_std": statistics.stdev(by_question) if len(by_question) > 1 else None,
        "runs": len(runs),
        "tokens": sum(sum(answer["new_tokens"]) for answer in answers),
        "tokens_per_s": _speed(answers),
        "first_token_s": statistics.median(seconds for answer in answers for seconds in answer["first_token_s"]),
        **dict(zip(("latency_p50_s", "latency_p90_s"), latency_percentiles(answers, 50, 90), strict=True)),
        "lossless": lossless,
        "greedy_identical": all(a["token_ids"] == b["token_ids"] for _, a, b in pairs) if greedy else None,
    }


def _speed(answers: Iterable[Answer]) -> float:
    """Tokens per second, prefill included."""
    tokens, seconds = 0, 0.0
    for answer in answers:
        tokens += sum(answer["new_tokens"])
        seconds += sum(answer["wall_time"])
    return tokens / seconds


def latency_percentiles(answers: Iterable[Answer], *percents: float) -> list[float | None]:
    """Seconds from one token to the next as a user sees them, percentiles over all tokens after the prefill's.

    A round's tokens arrive together: each of k kept ones counts as the round's seconds / k. Linear between tokens.
    """
    per_token = [
        (seconds / kept, kept)
        for answer in answers
        for seconds, kept in zip(answer["round_s"], answer["accept_lengths"], strict=True)
    ]
    if not per_token:
        return [None for _ in percents]
    seconds, kept = zip(*per_token, strict=True)
    return np.percentile(np.repeat(seconds, kept), percents).tolist()


def summarize_timing(records: list[Record], untimed: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """For each method and temperature: where a round's time went, and predicted beside measured speedup.

    Args:
        untimed: By arm, what `overlap.py` measured apart from the clock.
    """
    check_fair_clock(records)
    rows = []
    for key in records[0]["answers"]:
        pairs = _pairs(records, key, OVERALL)
        rounds = sum(len(answer["accept_lengths"]) for _, answer, _ in pairs)
        if rounds:
            rows.append(_timing_row(pairs, rounds, (untimed or {}).get(key)))
    return rows


def _timing_row(pairs: list[Pair], rounds: int, untimed: dict[str, Any] | None) -> dict[str, Any]:
    answers = [answer for _, answer, _ in pairs]
    baselines = [baseline for _, _, baseline in pairs]
    t_target_s = _median_per_round(baselines, "verify_s")
    t_draft_s = _median_per_round(answers, "draft_s")
    t_verify_s = _median_per_round(answers, "verify_s")
    draft_lengths = [length for answer in answers for length in answer["draft_lengths"]]
    tau = sum(sum(answer["accept_lengths"]) for answer in answers) / rounds
    predicted = tau * t_target_s / (t_draft_s + t_verify_s)
    decoding_speedup = _decoding_speed(answers) / _decoding_speed(baselines)
    speedup = _speed(answers) / _speed(baselines)
    return {
        "method": answers[0]["method"],
        "temperature": answers[0]["temperature"],
        "tau": tau,
        "t_target_step_s": t_target_s,
        "t_draft_s": t_draft_s,
        "t_verify_forward_s": t_verify_s,
        "t_choose_s": _median_per_round(answers, "choose_s"),
        "t_commit_s": _median_per_round(answers, "commit_s"),
        "cost_ratio": t_draft_s / t_target_s,
        "speedup_predicted": predicted,
        "speedup_decoding": decoding_speedup,
        "speedup_with_prefill": speedup,
        "loop_efficiency": decoding_speedup / predicted,
        "loop_efficiency_with_prefill": speedup / predicted,
        "acceptance_by_depth": acceptance_by_depth(draft_lengths),
        **theory_row(answers, t_draft_s / t_target_s, untimed),
    }


def acceptance_by_depth(draft_lengths: list[int]) -> list[float]:
    """Share of rounds that kept a drafted token at depth d, of those that kept depth d - 1; d = 1, 2, ..."""
    reached = len(draft_lengths)
    shares = []
    for depth in range(1, max(draft_lengths, default=0) + 1):
        kept = sum(length >= depth for length in draft_lengths)
        shares.append(kept / reached)
        reached = kept
    return shares


def _median_per_round(answers: list[Answer], key: str) -> float:
    """Median over questions of the mean seconds per round."""
    means = [
        sum(answer[key]) / len(answer["accept_lengths"]) for answer in answers if len(answer["accept_lengths"]) > 0
    ]
    return statistics.median(means) if means else 0.0


def _decoding_speed(answers: list[Answer]) -> float:
    """Tokens per second after the prefill, which gave each turn's first token."""
    tokens = sum(sum(answer["accept_lengths"]) for answer in answers)
    return tokens / sum(sum(answer["wall_time"]) - sum(answer["prefill_s"]) for answer in answers)
