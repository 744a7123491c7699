"""How the drafters were trained: accuracy and loss of each depth over the steps, and tau of simulated chains."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.report.page.measured import drafter_name
from draftsmith.eval.report.page.plot import LineChart, Point, Scale, line_chart, scale_around
from draftsmith.eval.report.summary import OVERALL
from draftsmith.eval.report.text import without_places
from draftsmith.models.base.registry import Training
from draftsmith.recipes.schema import DRAFTER_KIND

History = list[dict[str, float]]


@dataclass(frozen=True)
class HeldOut:
    """By depth from 1, on rows kept out of training; tau of greedy chains of so many drafted tokens."""

    step: int
    accuracy: list[float]
    tau: list[float]


@dataclass(frozen=True)
class TrainingCurves:
    name: str
    training: Training
    charts: list[LineChart]
    held_out: HeldOut | None


@dataclass(frozen=True)
class ComparedDrafter:
    """differs: its settings that are not those of all others; row: of the summary, its fastest method's."""

    name: str
    training: Training
    held_out: HeldOut | None
    differs: str
    row: dict[str, Any]


def compared_drafters(
    trained: dict[str, Training], recipe: dict[str, Any], summary: list[dict[str, Any]]
) -> list[ComparedDrafter]:
    """What was trained how, beside what came of it, the fastest first: an ablation. Empty for a single drafter.

    Args:
        trained: By the drafter's name.
        recipe: Whose methods say which drafter is theirs.
        summary: Rows of `summarize`; compared at the lowest temperature.
    """
    overall = [row for row in summary if row["category"] == OVERALL]
    lowest = min((row["temperature"] for row in overall), default=0.0)
    speeds = {row["method"]: row for row in overall if row["temperature"] == lowest}
    best: dict[str, dict[str, Any]] = {}
    for method in recipe["eval"]["methods"]:
        name = recipe["name"] if method["drafter"] is None else drafter_name(method["drafter"])
        row = speeds.get(method["name"])
        if method["kind"] == DRAFTER_KIND and name in trained and row is not None:
            best[name] = max(best.get(name, row), row, key=lambda each: each["speedup_mean"])
    if len(best) < 2:
        return []
    keys = differing_settings([trained[name].settings for name in best])
    found = [
        ComparedDrafter(name, trained[name], _held_out(trained[name]), _values(trained[name].settings, keys), row)
        for name, row in best.items()
    ]
    return sorted(found, key=lambda each: -each.row["speedup_mean"])


def differing_settings(settings: list[dict[str, Any]]) -> list[str]:
    """Keys whose values are not the same for all; hashes of data and weights say nothing to a reader."""
    keys = dict.fromkeys(key for each in settings for key in each if "(" not in key)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def _values(settings: dict[str, Any], keys: list[str]) -> str:
    shown = (f"{key.rpartition('.')[2]} {settings[key]}" for key in keys if settings.get(key) is not None)
    return without_places(", ".join(shown))


def training_curves(trained: dict[str, Training]) -> list[TrainingCurves]:
    """Of every drafter with a log.

    Args:
        trained: By the drafter's name.
    """
    return [
        TrainingCurves(name, training, _charts(name, training.history), _held_out(training))
        for name, training in trained.items()
        if training.history
    ]


def curves_by_depth(history: History, name: str) -> dict[str, list[Point]]:
    """(step, value) of each depth: `accuracy` of `accuracy_depth1`, `accuracy_depth2`, ..."""
    found: dict[int, list[Point]] = {}
    for entry in history:
        for key, value in entry.items():
            match = re.fullmatch(rf"{name}_depth(\d+)", key)
            if match and "step" in entry:
                found.setdefault(int(match[1]), []).append((entry["step"], value))
    return {str(depth): found[depth] for depth in sorted(found)}


def _charts(name: str, history: History) -> list[LineChart]:
    """Those that have lines, not points only."""
    decoded = [(entry["step"], entry["decoded_tau"]) for entry in history if "decoded_tau" in entry]
    wanted = [
        ("Accuracy by depth, training rows", curves_by_depth(history, "accuracy"), Scale(0.0, 1.0)),
        ("Loss by depth, training rows", curves_by_depth(history, "loss"), None),
        ("Accuracy by depth, rows kept out", curves_by_depth(history, "eval_accuracy"), Scale(0.0, 1.0)),
        ("Simulated tau by chain length, rows kept out", curves_by_depth(history, "eval_tau"), None),
        ("Tau of real chains, decoded while training", {"": decoded} if decoded else {}, None),
    ]
    charts = []
    for title, series, y_scale in wanted:
        series = {each: points for each, points in series.items() if len(points) > 1}
        if not series:
            continue
        steps = [point[0] for points in series.values() for point in points]
        values = [point[1] for points in series.values() for point in points]
        charts.append(
            line_chart(title, "step", series, Scale(min(0.0, *steps), max(steps)), y_scale or scale_around(values))
        )
    return charts


def _held_out(training: Training) -> HeldOut | None:
    """Of the weights that were kept, as `TrainReport` has it."""
    entries = [entry for entry in training.history if "eval_loss" in entry]
    wanted = [entry for entry in entries if training.best_step in (None, entry["step"])]
    if not wanted:
        return None
    last = wanted[-1:]
    accuracy = curves_by_depth(last, "eval_accuracy")
    tau = curves_by_depth(last, "eval_tau")
    values = [[points[0][1] for points in each.values()] for each in (accuracy, tau)]
    return HeldOut(int(wanted[-1]["step"]), *values)
