"""From the harness's records to numbers: tau, speedup and its spread, greedy identity, and where the time went.

tau                  tokens kept per round, the target's own included (the paper's acceptance length)
tau_without_bonus    drafted tokens kept per round
speedup of a run     (tokens / s of the method) / (tokens / s of the autoregressive loop), same questions, same
                     process, prefill included on both sides; mean and standard deviation are over the runs
loop efficiency      measured decoding speedup / (tau * t_target_step / (t_draft + t_verify_forward)): what is lost
                     in the loop's own Python; decoding = without the prefill
cost ratio c         t_draft / t_target_step, of a whole round
alpha, tau (iid)     mean acceptance rate, and Leviathan's equation 1 with it: what the measured tau has above that is
                     due to rounds being alike, as easy text comes in stretches
theorem 3.8          tau (iid) / (c + 1): as if acceptances were independent and verification cost a single step
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from draftsmith.eval.methods.method import AUTOREGRESSIVE
from draftsmith.eval.theory import acceptance_rate, expected_tokens
from draftsmith.recipes.errors import UserError

OVERALL = "overall"
Record = dict[str, Any]
Answer = dict[str, Any]


def summarize(records: list[Record]) -> list[dict[str, Any]]:
    """One row for each method, temperature and category, `overall` included.

    Raises:
        UserError: There is no record, or one mixes measurements of several processes.
    """
    check_fair_clock(records)
    return [
        _row(_pairs(records, key, category), category)
        for key in records[0]["answers"]
        for category in [*dict.fromkeys(record["category"] for record in records), OVERALL]
    ]


def check_fair_clock(records: list[Record]) -> None:
    """A speedup compares times of one process only."""
    if not records:
        raise UserError("nothing has been measured yet: run `draftsmith eval` with this recipe first")
    for record in records:
        answers = record["answers"].values()
        if len({answer["process"] for answer in answers}) > 1:
            raise UserError(
                f"run {record['run']} of question {record['question_id']} mixes times of several processes, which "
                "cannot be compared: delete that line from records.jsonl and run `draftsmith eval` again"
            )
        baselines = {answer["temperature"] for answer in answers if answer["method"] == AUTOREGRESSIVE}
        if not baselines >= {answer["temperature"] for answer in answers}:
            raise UserError(
                f"run {record['run']} of question {record['question_id']} lacks its autoregressive baseline: "
                "delete that line from records.jsonl and run `draftsmith eval` again"
            )


Pair = tuple[int, Answer, Answer]  # run, the method's answer, the baseline's answer


def _pairs(records: list[Record], key: str, category: str) -> list[Pair]:
    pairs = []
    for record in records:
        if category in (OVERALL, record["category"]):
            answer = record["answers"][key]
            baseline = record["answers"][f"{AUTOREGRESSIVE}@{answer['temperature']:g}"]
            pairs.append((record["run"], answer, baseline))
    return pairs


def _row(pairs: list[Pair], category: str) -> dict[str, Any]:
    answers = [answer for _, answer, _ in pairs]
    rounds = sum(len(answer["accept_lengths"]) for answer in answers)
    runs = sorted({run for run, _, _ in pairs})
    speedups = []
    for run in runs:
        of_run = [(answer, baseline) for number, answer, baseline in pairs if number == run]
        speedups.append(_speed(answer for answer, _ in of_run) / _speed(baseline for _, baseline in of_run))
    # Records older than lenience have none.
    lossless = answers[0].get("lenience", 1.0) == 1
    greedy = answers[0]["temperature"] == 0 and lossless
    return {
        "method": answers[0]["method"],
        "temperature": answers[0]["temperature"],
        "category": category,
        "tau": sum(sum(answer["accept_lengths"]) for answer in answers) / rounds if rounds else None,
        "tau_without_bonus": sum(sum(answer["draft_lengths"]) for answer in answers) / rounds if rounds else None,
        "speedup_mean": statistics.fmean(speedups),
        "speedup_std": statistics.stdev(speedups) if len(speedups) > 1 else None,
        "runs": len(runs),
        "tokens": sum(sum(answer["new_tokens"]) for answer in answers),
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


def summarize_timing(records: list[Record]) -> list[dict[str, Any]]:
    """For each method and temperature: where a round's time went, and predicted beside measured speedup."""
    check_fair_clock(records)
    rows = []
    for key in records[0]["answers"]:
        pairs = _pairs(records, key, OVERALL)
        rounds = sum(len(answer["accept_lengths"]) for _, answer, _ in pairs)
        if rounds:
            rows.append(_timing_row(pairs, rounds))
    return rows


def _timing_row(pairs: list[Pair], rounds: int) -> dict[str, Any]:
    answers = [answer for _, answer, _ in pairs]
    baselines = [baseline for _, _, baseline in pairs]
    t_target_s = _median_per_round(baselines, "verify_s")
    t_draft_s = _median_per_round(answers, "draft_s")
    t_verify_s = _median_per_round(answers, "verify_s")
    draft_lengths = [length for answer in answers for length in answer["draft_lengths"]]
    gamma = max(draft_lengths, default=0)  # the deepest token ever kept
    alpha = acceptance_rate(draft_lengths, gamma)
    tau_iid = expected_tokens(alpha, gamma)
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
        "t_loop_s": _loop_time(answers) / rounds,
        "cost_ratio": t_draft_s / t_target_s,
        "speedup_predicted": predicted,
        "speedup_decoding": decoding_speedup,
        "speedup_with_prefill": speedup,
        "loop_efficiency": decoding_speedup / predicted,
        "loop_efficiency_with_prefill": speedup / predicted,
        "acceptance_by_depth": acceptance_by_depth(draft_lengths),
        "alpha": alpha,
        "tau_predicted_iid": tau_iid,
        "speedup_predicted_iid": tau_iid / (t_draft_s / t_target_s + 1),
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


def _loop_time(answers: list[Answer]) -> float:
    """Seconds in rounds that neither drafted nor ran the target."""
    return sum(
        sum(answer["wall_time"]) - sum(answer["prefill_s"]) - sum(answer["draft_s"]) - sum(answer["verify_s"])
        for answer in answers
    )
