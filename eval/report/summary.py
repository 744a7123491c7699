"""Figures of an evaluation, computed from the harness's records, for report, page, terminal and `result.json`.

tau                  tokens committed per round, the target's own included (the paper's acceptance length), all rounds;
                     tau_by_question: mean over questions of each one's; tau_without_bonus: accepted draft tokens
speedup of a run     (tokens / s of the method) / (tokens / s of the autoregressive loop), same questions and process,
                     prefill included on both sides, all tokens / all seconds; mean and standard deviation over runs
speedup_by_question  with means over questions of each one's tokens / s, as Spec-Bench (evaluation/speed.py), whose
                     figure is higher: it tokenizes the baseline's text again, without end tokens
..._interval         95 % confidence interval over questions: `bootstrap.py`
over_tasks           means over tasks of each task's pooled tau and speedup (all runs together), with intervals, if
                     there are two tasks or more. They are then the headline, by which methods are ordered and chosen
timing               seconds of a round's phases (see `AnswerRecord`), medians over questions of means over rounds:
                     t_target_step_s, ...; t_draft_s without each answer's first draft, which reads the prompt
loop efficiency      measured decoding speedup / (tau * t_target_step / (t_draft + t_verify_forward)): below 1 by the
                     overhead of the loop's Python code and by first drafts; decoding = without the target's prefill
cost ratio           t_draft / t_target_step, of a whole round
seeds                `recipe/method`, `recipe-seed-1/method`, ...: the same recipe trained with several seeds

A task may join several categories, as Spec-Bench's `mt_bench` joins eight. They are shown only where it is the only
task, so that no question counts twice. What the figures mean is in `docs/concepts/metrics.md`.

Everywhere `summary` are the rows of `summarize`, `baseline` those of `baseline_speeds`, `proof` is the JSON of
`draftsmith prove`, None if it was not run.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from draftsmith.eval.bench.divergence import RecordedDivergence, differing_answers
from draftsmith.eval.bench.records import MethodResult, QuestionRecord, check_fair_clock
from draftsmith.eval.decoding.generate import AnswerRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report import bootstrap
from draftsmith.recipes.schema import SEED_SUFFIX, Recipe

OVERALL, MEAN_OF_TASKS = "overall", "mean of tasks"
# Figures of each category that a document may quote.
CATEGORY_FIGURES = (
    "tau", "tau_without_bonus", "speedup_mean", "speedup_std", "tokens", "greedy_identical",
    "different_answers", "numerical_ties",
)  # fmt: skip

Row = dict[str, Any]
Pair = tuple[int, MethodResult, MethodResult]  # run, the method's answers, the baseline's answers


def summarize(records: list[QuestionRecord], divergences: Iterable[RecordedDivergence] = ()) -> list[Row]:
    """Compute one row of figures per method, temperature and task (category, if there is one task) and `overall`.

    Args:
        divergences: First differences of greedy answers from the baseline's, as `find_divergences` returns them.

    Raises:
        UserError: There is no record, or one has answers that cannot be compared.
    """
    check_fair_clock(records)
    tasks = dict.fromkeys(record.task_name for record in records)
    categories = tasks if len(tasks) > 1 else dict.fromkeys(record.category for record in records)
    ties = {(each.run, each.question_id, each.arm) for each in divergences if each.is_tie}
    return [_row(records, key, category, ties) for key in records[0].answers for category in [*categories, OVERALL]]


def _pairs(records: list[QuestionRecord], key: str, category: str) -> list[Pair]:
    """Return the answers of `method@temperature` and of the baseline to a category's questions."""
    return [(record.run, *record.with_baseline(key)) for record in records if _belongs(record, category)]


def _belongs(record: QuestionRecord, category: str) -> bool:
    return category in (OVERALL, record.category, record.task_name)


def _turns(answers: Iterable[MethodResult]) -> list[AnswerRecord]:
    return [turn for answer in answers for turn in answer.turns]


def _row(records: list[QuestionRecord], key: str, category: str, ties: Collection[tuple[int, int | str, str]]) -> Row:
    """Compute the figures of `method@temperature` over a category."""
    pairs = _pairs(records, key, category)
    answers = [answer for _, answer, _ in pairs]
    turns, first = _turns(answers), answers[0]
    rounds = sum(turn.rounds for turn in turns)
    runs = sorted({run for run, _, _ in pairs})
    speedups, by_question = [], []
    for run in runs:
        mine = [answer.turns for number, answer, _ in pairs if number == run]
        baseline = [answer.turns for number, _, answer in pairs if number == run]
        speedups.append(_speed(chain(*mine)) / _speed(chain(*baseline)))
        by_question.append(sum(map(_speed, mine)) / sum(map(_speed, baseline)))
    accept_lengths = [[length for turn in answer.turns for length in turn.accept_lengths] for answer in answers]
    taus = [statistics.fmean(lengths) for lengths in accept_lengths if lengths]
    return {
        "method": first.method,
        "temperature": first.temperature,
        "category": category,
        "tau": sum(sum(turn.accept_lengths) for turn in turns) / rounds if rounds else None,
        "tau_by_question": statistics.fmean(taus) if taus else None,
        "tau_without_bonus": sum(turn.accepted_drafts for turn in turns) / rounds if rounds else None,
        "speedup_mean": statistics.fmean(speedups),
        "speedup_std": statistics.stdev(speedups) if len(speedups) > 1 else None,
        "speedup_by_question_mean": statistics.fmean(by_question),
        "runs": len(runs),
        "tokens": sum(len(turn.ids) for turn in turns),
        "tokens_per_s": _speed(turns),
        "lossless": first.lossless,
        **draft_vocabulary_figures(turns),
        **_intervals(question_sums(records, key, category), first),
        "over_tasks": _over_tasks(records, key) if category == OVERALL else None,
        "timing": _timing(pairs) if category == OVERALL and rounds else None,
        **_identity(records, key, category, ties),
    }


def question_sums(
    records: list[QuestionRecord], key: str, category: str = OVERALL, over_tasks: bool = False
) -> bootstrap.QuestionSums:
    """Sum up tokens, rounds and seconds of the answers of `key`, a `method@temperature`, by question.

    Args:
        over_tasks: Give tasks equal weight instead of pooling all tokens, if there are several.
    """
    by_question: dict[int | str, list[tuple[MethodResult, MethodResult]]] = {}
    tasks: dict[int | str, str] = {}
    for record in records:
        if _belongs(record, category):
            by_question.setdefault(record.question_id, []).append(record.with_baseline(key))
            tasks[record.question_id] = record.task_name
    several = over_tasks and len(set(tasks.values())) > 1
    return bootstrap.QuestionSums.of(list(by_question.values()), list(tasks.values()) if several else None)


def _over_tasks(records: list[QuestionRecord], key: str) -> Row | None:
    """Compute the means over tasks, under the names of the pooled figures; None for a single task."""
    sums = question_sums(records, key, over_tasks=True)
    if sums.tasks is None:
        return None
    drafted = all(own.rounds.sum() for _, own in sums.by_task())  # a task whose answers have one token has no tau
    return {
        "tasks": len(set(sums.tasks)),
        "questions": dict(Counter(sums.tasks)),
        "tau": bootstrap.compute_ratio(bootstrap.tau, sums) if drafted else None,
        "speedup_mean": bootstrap.compute_ratio(bootstrap.speedup, sums),
        **_intervals(sums, records[0].answers[key]),
    }


def _intervals(sums: bootstrap.QuestionSums, answer: MethodResult) -> dict[str, list[float] | None]:
    drafts = bool(sums.rounds.sum()) and answer.method != AUTOREGRESSIVE
    figures = {"tau_interval": bootstrap.tau, "speedup_interval": bootstrap.speedup}
    return {name: bootstrap.interval(figure, sums) if drafts else None for name, figure in figures.items()}


def _identity(
    records: list[QuestionRecord], key: str, category: str, ties: Collection[tuple[int, int | str, str]]
) -> dict[str, bool | int | None]:
    """Count a lossless method's greedy answers that differ from the baseline's, and the ties among them."""
    answer = records[0].answers[key]
    if answer.temperature > 0 or not answer.lossless:
        return {"greedy_identical": None, "different_answers": None, "numerical_ties": None}
    different = [
        (record.run, record.question_id, key)
        for record in records
        if _belongs(record, category) and any(key == other for other, *_ in differing_answers(record))
    ]
    return {
        "greedy_identical": not different,
        "different_answers": len(different),
        "numerical_ties": sum(each in ties for each in different),
    }


def draft_vocabulary_figures(turns: list[AnswerRecord]) -> dict[str, float | None]:
    """Compute the effect of a reduced draft vocabulary, over all rounds; None if every token can be drafted.

    decoded_coverage           share of the tokens committed in rounds that are in the draft vocabulary
    rounds_ended_outside       share of the rounds whose drafts were rejected at a token outside the draft vocabulary;
                               a token after the longest path does not count
    tau_lost_at_most           increase of tau if each of these rounds had accepted the rest of its longest path
    """
    keys = ("decoded_coverage", "rounds_ended_outside", "tau_lost_at_most")
    measured = [turn for turn in turns if turn.outside_tokens is not None and turn.ended_outside is not None]
    rounds = sum(turn.rounds for turn in measured)
    if not rounds:
        return dict.fromkeys(keys)
    outside = sum(turn.outside_tokens or 0 for turn in measured)
    ended = [(turn, number) for turn in measured for number in turn.ended_outside or []]
    remaining = sum(turn.draft_depths[number] - turn.draft_lengths[number] for turn, number in ended)
    committed = sum(sum(turn.accept_lengths) for turn in measured)
    return dict(zip(keys, (1 - outside / committed, len(ended) / rounds, remaining / rounds), strict=True))


def _speed(turns: Iterable[AnswerRecord]) -> float:
    """Return tokens per second, prefill included."""
    turns = list(turns)
    return sum(len(turn.ids) for turn in turns) / sum(turn.wall_time_s for turn in turns)


def _timing(pairs: list[Pair]) -> Row:
    """Compute the median times of a round's phases, and predicted and measured speedup."""
    answers = [answer for _, answer, _ in pairs]
    baselines = [baseline for _, _, baseline in pairs]
    turns = _turns(answers)
    t_target_s = _median_per_round(baselines, lambda turn: turn.verify_s)
    t_draft_s = _median_per_round(answers, lambda turn: turn.usual_draft_s)
    t_verify_s = _median_per_round(answers, lambda turn: turn.verify_s)
    tau = sum(sum(turn.accept_lengths) for turn in turns) / sum(turn.rounds for turn in turns)
    predicted = tau * t_target_s / (t_draft_s + t_verify_s)
    decoding_speedup = _decoding_speed(turns) / _decoding_speed(_turns(baselines))
    return {
        "t_target_step_s": t_target_s,
        "t_draft_s": t_draft_s,
        "t_verify_forward_s": t_verify_s,
        "t_choose_s": _median_per_round(answers, lambda turn: turn.choose_s),
        "t_commit_s": _median_per_round(answers, lambda turn: turn.commit_s),
        "cost_ratio": t_draft_s / t_target_s,
        "speedup_predicted": predicted,
        "speedup_decoding": decoding_speedup,
        "loop_efficiency": decoding_speedup / predicted,
        "acceptance_by_depth": acceptance_by_depth([length for turn in turns for length in turn.draft_lengths]),
    }


def acceptance_by_depth(draft_lengths: list[int]) -> list[float]:
    """Return for d = 1, 2, ... the acceptance rate at depth d among the rounds that accepted depth d - 1.

    Args:
        draft_lengths: Accepted draft tokens of each round.
    """
    reached = len(draft_lengths)
    shares = []
    for depth in range(1, max(draft_lengths, default=0) + 1):
        accepted = sum(length >= depth for length in draft_lengths)
        shares.append(accepted / reached)
        reached = accepted
    return shares


def _median_per_round(answers: list[MethodResult], seconds: Callable[[AnswerRecord], float]) -> float:
    """Return the median over questions of the mean seconds per round."""
    rounds = [sum(turn.rounds for turn in answer.turns) for answer in answers]
    totals = [sum(map(seconds, answer.turns)) for answer in answers]
    means = [total / count for total, count in zip(totals, rounds, strict=True) if count]
    return statistics.median(means) if means else 0.0


def _decoding_speed(turns: list[AnswerRecord]) -> float:
    """Return tokens per second after the prefill, which gave each turn's first token."""
    return sum(sum(turn.accept_lengths) for turn in turns) / sum(turn.wall_time_s - turn.prefill_s for turn in turns)


# ---- choosing rows ----


def method_key(row: Row) -> str:
    """Return `method@temperature`, the name of a row in files and documents."""
    return f"{row['method']}@{row['temperature']:g}"


def drafted_rows(summary: list[Row]) -> list[Row]:
    """Return the summary's rows over all questions (`overall`), without those of the baseline."""
    return [row for row in summary if row["category"] == OVERALL and row["method"] != AUTOREGRESSIVE]


def by_temperature(rows: list[Row]) -> dict[float, list[Row]]:
    """Group the rows by temperature, the lowest first."""
    temperatures = sorted({row["temperature"] for row in rows})
    return {temperature: [row for row in rows if row["temperature"] == temperature] for temperature in temperatures}


def headline(row: Row) -> Row:
    """Return a row's main figures, by which methods are ordered: the means over tasks if there are several."""
    return row.get("over_tasks") or row


def best_row(rows: list[Row]) -> Row:
    """Return the row of the fastest lossless method, or the fastest of all if none is lossless."""
    return max(rows, key=lambda row: (row["lossless"], headline(row)["speedup_mean"]))


# ---- figures computed from rows ----


def seed_spread(summary: list[Row]) -> list[Row]:
    """Compute means and standard deviations over training seeds, for each method and temperature with several."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in summary:
        if row["category"] == OVERALL and headline(row)["tau"] is not None:
            name = re.sub(rf"{SEED_SUFFIX}\d+(?=/|$)", "", row["method"])
            groups.setdefault((name, row["temperature"]), []).append(row)
    return [
        {
            "method": name,
            "temperature": temperature,
            "seeds": len(rows),
            **{
                f"{figure}_{kind}": over([headline(row)[key] for row in rows])
                for figure, key in (("tau", "tau"), ("speedup", "speedup_mean"))
                for kind, over in (("mean", statistics.fmean), ("std", statistics.stdev))
            },
        }
        for (name, temperature), rows in groups.items()
        if len(rows) > 1
    ]


def baseline_speeds(records: list[QuestionRecord], summary: list[Row]) -> list[Row]:
    """Compare the bytes per second of the baseline's step with a plain read's, one row per temperature.

    Empty if no read was recorded, as for a mixture of experts.
    """
    reads = [
        (each.weights_bytes, each.weights_read_s) for each in records if each.weights_bytes and each.weights_read_s
    ]
    if not reads:
        return []
    weights_bytes = reads[0][0]
    read_bytes_per_s = statistics.median(count / seconds for count, seconds in reads)
    steps_s = {row["temperature"]: row["timing"]["t_target_step_s"] for row in summary if row["timing"]}
    return [
        {
            "temperature": temperature,
            "weights_bytes": weights_bytes,
            "step_s": step_s,
            "step_bytes_per_s": weights_bytes / step_s,
            "read_bytes_per_s": read_bytes_per_s,
            "share": weights_bytes / step_s / read_bytes_per_s,
        }
        for temperature, step_s in steps_s.items()
        if step_s > 0
    ]


def evaluation_figures(recipe: Recipe, summary: list[Row], questions: int, proof: Any, baseline: list[Row]) -> Row:
    """Return all figures that a document may quote, in the form of `core/results.py`, each under its own name.

    By `method@temperature`: the row over all questions, and the main figures by category. Also each method's settings,
    as in `eval.methods`.
    """
    rows: dict[str, Row] = {}
    for row in summary:
        figures = rows.setdefault(method_key(row), {})
        if row["category"] == OVERALL:
            figures |= row
        else:
            by_category = figures.setdefault("by_category", {})
            by_category[row["category"]] = {key: row[key] for key in CATEGORY_FIGURES}
    return {
        "recipe": recipe.name,
        "target": recipe.target.gguf_file or recipe.target.model,
        "dtype": recipe.target.dtype,
        "asked": questions,
        "settings": recipe.eval.model_dump(include={"questions", "max_new_tokens", "runs", "stop", "top_k", "top_p"}),
        "methods": method_settings(recipe),
        "rows": rows,
        "over_seeds": {method_key(row): row for row in seed_spread(summary)},
        "proof": proof,
        "baseline": baseline,
    }


def method_settings(recipe: Recipe) -> dict[str, Row]:
    """Return the settings of each method that are not the defaults, by name, without folders of this machine."""
    methods = {}
    for method in recipe.eval.methods:
        methods[method.name] = method.model_dump(exclude_defaults=True, exclude={"name"})
        if method.drafter is not None:  # the last two parts of a folder, which are equal on all machines
            methods[method.name]["drafter"] = "/".join(Path(method.drafter).parts[-2:])
    return methods
