"""`draftsmith compare runs/a runs/b`: finished measurements beside each other, question by question.

Each run has its own baseline in its own process, so speeds are compared as speedups over it. Every method is set
against the first run's fastest; what the difference may be by chance of the questions is a paired bootstrap over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftsmith.eval.artifacts.measurement import RECORDS
from draftsmith.eval.bench.records import SETTINGS, QuestionRecord, RecordLog, check_fair_clock
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.report import bootstrap
from draftsmith.eval.report.summary import question_sums
from draftsmith.recipes.errors import UserError


@dataclass(frozen=True)
class RunMeasured:
    """A run's folder and its records, in one order of questions for all runs."""

    folder: Path
    records: list[QuestionRecord]

    @property
    def drafting(self) -> list[str]:
        """Its methods without the baselines, by `method@temperature`."""
        return [key for key, answer in self.records[0].answers.items() if answer.method != AUTOREGRESSIVE]


def compare_runs(folders: list[Path]) -> list[dict[str, Any]]:
    """A row for each method of each run, the first run's fastest of its temperature first: that one is the reference.

    Raises:
        UserError: There is only one run, or two cannot be compared: names what differs.
    """
    if len(folders) < 2:
        raise UserError(f"one run cannot be compared: name a second one beside {folders[0]}")
    runs = [RunMeasured(folder, list(RecordLog(folder / "eval" / RECORDS))) for folder in folders]
    for run in runs:
        try:
            check_fair_clock(run.records)
        except UserError as error:
            raise UserError(f"{run.folder}: {error}") from None
    for other in runs[1:]:
        _check_alike(runs[0], other)
    order = {question: place for place, question in enumerate(_questions(runs[0]))}
    for run in runs:
        run.records.sort(key=lambda record: (record.run, order[record.question_id]))
    return [row for temperature in _temperatures(runs[0]) for row in _rows(runs, temperature)]


def _rows(runs: list[RunMeasured], temperature: float) -> list[dict[str, Any]]:
    methods = [
        (run.folder, key, question_sums(run.records, key))
        for run in runs
        for key in run.drafting
        if run.records[0].answers[key].temperature == temperature
    ]
    ours = [each for each in methods if each[0] == runs[0].folder]
    if not ours:
        return []
    every = bootstrap.every_question(len(_questions(runs[0])))
    reference = max(ours, key=lambda each: float(bootstrap.speedup(each[2], every)[0]))
    rows = []
    for each in [reference, *(each for each in methods if each is not reference)]:
        folder, key, sums = each
        row: dict[str, Any] = {"run": str(folder), "method": key.rpartition("@")[0], "temperature": temperature}
        for name, figure in (("tau", bootstrap.tau), ("speedup", bootstrap.speedup)):
            value, of_reference = (float(figure(each, every)[0]) for each in (sums, reference[2]))
            row |= {name: value, f"{name}_interval": bootstrap.interval(figure, sums)}
            row[f"{name}_ratio"] = value / of_reference
            row[f"{name}_ratio_interval"] = bootstrap.paired_ratio(figure, sums, reference[2])
        row["reference"] = each is reference
        rows.append(row)
    return rows


def _questions(run: RunMeasured) -> list[int | str]:
    return list(dict.fromkeys(record.question_id for record in run.records))


def _temperatures(run: RunMeasured) -> list[float]:
    return list(dict.fromkeys(answer.temperature for answer in run.records[0].answers.values()))


def _check_alike(first: RunMeasured, other: RunMeasured) -> None:
    """The same questions, asked of the same target with the same settings."""
    both = f"{first.folder} and {other.folder} cannot be compared"
    differing = set(_questions(first)) ^ set(_questions(other))
    if differing:
        example = sorted(map(str, differing))[0]
        raise UserError(
            f"{both}: {len(differing)} question(s) were asked in one of them only, {example} for example: measure both "
            "with the same eval.questions, limit_per_category and max_new_tokens"
        )
    if not set(_temperatures(first)) & set(_temperatures(other)):
        raise UserError(f"{both}: they have no temperature in common: measure both with the same eval.temperatures")
    baselines = [
        {
            (record.question_id, key): answer.settings
            for record in run.records
            for key, answer in record.answers.items()
            if answer.method == AUTOREGRESSIVE
        }
        for run in (first, other)
    ]
    for (question, key), mine in baselines[0].items():
        theirs = baselines[1].get((question, key))
        different = [] if theirs is None else [SETTINGS[name] for name in SETTINGS if mine[name] != theirs[name]]
        if different:
            raise UserError(
                f"{both}: question {question} was answered with other {', '.join(different)}: measure both with the "
                "same settings"
            )


def show_runs(rows: list[dict[str, Any]], console: Console) -> None:
    """The rows as tables, one for each temperature."""
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        table = Table(title=f"T = {temperature:g}, intervals of 95 % over questions", title_justify="left", box=None)
        for heading in ("run", "method", "tau", "speedup", "speed against the first", ""):
            table.add_column(heading, overflow="fold")
        for row in (row for row in rows if row["temperature"] == temperature):
            cells = [f"{row[name]:.2f}{_ends(row[f'{name}_interval'])}" for name in ("tau", "speedup")]
            ratio = "" if row["reference"] else f"{row['speedup_ratio']:.2f}x{_ends(row['speedup_ratio_interval'])}"
            table.add_row(escape(row["run"]), escape(row["method"]), *cells, ratio, verdict(row))
        console.print(table)
    console.print(
        "speedup: each over its own run's baseline, in that run's process; a machine that was busier in one of them "
        "shows in both and mostly cancels",
        style="italic",
    )


def verdict(row: dict[str, Any]) -> str:
    """What the questions show of a method against the reference."""
    ends = row["speedup_ratio_interval"]
    if row["reference"]:
        return "the reference"
    if ends is None:
        return "too few questions"
    return "faster" if ends[0] > 1 else "slower" if ends[1] < 1 else "no difference shown"


def _ends(ends: list[float] | None) -> str:
    return "" if ends is None else f" ({ends[0]:.2f} to {ends[1]:.2f})"
