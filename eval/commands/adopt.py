"""`draftsmith adopt`: a published drafter beside a changed target: what it is still worth, and what training brings.

The target may be fine-tuned or quantised, or be asked other things than the drafter was trained for. Its own answers
(the recipe's, distilled if they are not there) are split into rows to train on and rows that are kept out. On these the
tau of the drafter as it is stands beside two trainings of the same time: one that goes on from it, and the recipe's own
from nothing. Each is trained in legs, and weighed after every one by replay (`search.replay`): tau by the minute.

A leg is a run of its own, `runs/<name>-adopt-<way>-<leg>`: what is finished is not run again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from draftsmith.data.distill.token_dataset import load_tokens
from draftsmith.eval.commands.console import console, print_table
from draftsmith.eval.commands.learning import drafter_alone, paired_interval, recipe_of_drafter, tau_of
from draftsmith.eval.commands.search import EVAL_ROWS_FRAC, replay
from draftsmith.eval.commands.stages import run_distill
from draftsmith.eval.methods.drafter import drafter_method
from draftsmith.eval.report.charts import COLOURS
from draftsmith.eval.trees.verify import Sampling
from draftsmith.models.base.registry import drafter_place, load_drafter
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, write_atomically
from draftsmith.recipes.schema import DRAFTER_KIND, MethodRecipe, Recipe
from draftsmith.train.drafter.rows import answers_in, split_rows
from draftsmith.train.drafter.stage import train_drafter

ON, ANEW = "going on", "from nothing"
PILOT_STEPS = 20  # of each way's first leg, which says how long a step takes
FILE, PICTURE = "adopt.json", "adopt.png"


@dataclass(frozen=True)
class Point:
    """Where a training stands: seconds of it so far, its tau on the rows kept out, and how far that is from the
    drafter's as it is, with an interval of 90 % over rows."""

    way: str
    seconds: float
    steps: int
    tau: float
    low: float
    high: float
    drafter: str


@dataclass(frozen=True)
class Adoption:
    """tau: of the drafter as it is; rows: that were kept out and have an answer; advice: what to do, in a sentence."""

    recipe: str
    drafter: str
    tau: float
    rows: int
    points: list[Point]
    advice: str


def adopt(recipe: Recipe, drafter: str, minutes: float, legs: int, rows: int) -> Adoption:
    """Weigh a drafter, and two trainings of so many minutes.

    Args:
        recipe: Names the changed target and its data; its drafter is the one that is trained from nothing, its first
            method with a drafter of its own is what tau is measured with, without lookups.
        drafter: A folder or a Hub id.
        legs: After each of which a training is weighed.
        rows: That are kept out, at most.

    Raises:
        UserError: The drafter does not fit the target, or no row that is kept out has an answer; or a stage's own.
    """
    data = recipe.data.model_copy(update={"eval_rows_frac": recipe.data.eval_rows_frac or EVAL_ROWS_FRAC})
    recipe = recipe.model_copy(update={"data": data})
    target, _ = load_target(recipe.target)
    place = drafter_place(drafter)
    load_drafter(place, target)  # refused before anything is distilled
    run_distill(recipe)
    scale = _Scale(recipe, target, rows)
    as_it_is, points = scale.taus(place), list[Point]()
    console.print(f"{drafter} as it is: tau {tau_of(scale.tokens, as_it_is):.2f} on {len(scale.tokens)} rows kept out")
    begun: dict[str, dict[str, Any]] = {
        ON: recipe_of_drafter(place) | {"init": str(place), "init_vocabulary": "extended"},
        ANEW: recipe.drafter.model_dump(),
    }
    seconds, steps_of_leg = dict.fromkeys(begun, 0.0), dict[str, int]()
    for leg in range(legs + 1):
        for way, section in begun.items():
            steps = steps_of_leg.get(way, PILOT_STEPS)
            report = train_drafter(_leg(recipe, way, leg, section, steps))
            folder = RunFolder(_leg(recipe, way, leg, section, steps)).drafter
            pace_s = report.wall_time_s / max(report.steps, 1)
            steps_of_leg.setdefault(way, max(1, round((60 * minutes - report.wall_time_s) / legs / pace_s)))
            begun[way] = recipe_of_drafter(folder) | {"init": str(folder)}
            seconds[way] += report.wall_time_s
            taus = scale.taus(folder)
            interval = paired_interval(scale.tokens, as_it_is, taus)
            done = PILOT_STEPS + leg * steps_of_leg[way]
            points.append(Point(way, seconds[way], done, tau_of(scale.tokens, taus), *interval, str(folder)))
            console.print(_sentence(points[-1]), markup=False)
    tau = tau_of(scale.tokens, as_it_is)
    found = Adoption(recipe.name, drafter, tau, len(scale.tokens), points, advice(drafter, tau, points))
    root = RunFolder(recipe).root
    write_atomically(root / FILE, json.dumps(asdict(found), indent=1) + "\n")
    _draw(found, root / PICTURE)
    return found


def advice(drafter: str, tau: float, points: Sequence[Point]) -> str:
    """What to do: the way that is ahead at its end, if it is beyond noise."""
    last = {point.way: point for point in points}
    best = max(last.values(), key=lambda point: point.tau)
    if best.low <= 0:
        return (
            f"use {drafter} as it is: no training of {best.seconds / 60:.0f} minutes was better beyond noise (its tau "
            f"is {tau:.2f}, {best.tau:.2f} {best.way})"
        )
    rising = [point.tau for point in points if point.way == best.way][-2:]
    more = "; it still rises: train longer" if len(rising) == 2 and rising[1] > 1.01 * rising[0] else ""
    what = "go on from it" if best.way == ON else "train one from nothing"
    return (
        f"{what}: tau {tau:.2f} -> {best.tau:.2f} ({best.low:+.2f} to {best.high:+.2f}) in {best.seconds / 60:.1f} "
        f"minutes, {best.drafter}{more}"
    )


class _Scale:
    """Rows that are kept out of all training, and what a drafter's tau on each is."""

    def __init__(self, recipe: Recipe, target: Any, rows: int) -> None:
        own = [m for m in recipe.eval.methods if m.kind == DRAFTER_KIND and m.tree != "tuned"]
        self._method = drafter_alone(own[0] if own else MethodRecipe(name="chain"))
        self._target = target
        _, kept_out = split_rows(load_tokens(RunFolder(recipe), recipe.name), recipe.data.eval_rows_frac)
        assert kept_out is not None
        parts = kept_out.select(range(min(rows, len(kept_out)))).with_format(
            "torch", columns=["input_ids", "loss_mask"]
        )
        self._rows, self.tokens = [], list[int]()
        for row in parts:
            length = sum(last - first for first, last in answers_in(row["loss_mask"].tolist()) if first)
            if length > 0:
                self._rows.append((row["input_ids"].to(target.device, dtype=int), row["loss_mask"]))
                self.tokens.append(length)
        if not self._rows:
            raise UserError("the rows kept out of training hold no answer: raise data.eval_rows_frac")

    def taus(self, folder: Path) -> list[float]:
        """Of each row."""
        drafter = load_drafter(folder, self._target)
        decoder = drafter.decoder(max(len(ids) for ids, _ in self._rows) + drafter.config.num_depths + 1)
        method, taus = drafter_method(self._method, decoder, Sampling()), []
        for ids_s, mask_s in self._rows:
            with torch.inference_mode():
                features_sf = target_features(self._target, ids_s[None], layers=drafter.feature_layers)[0]
            taus.append(replay(method, [(ids_s, mask_s, features_sf)]) or 1.0)
        return taus


def _leg(recipe: Recipe, way: str, leg: int, section: dict[str, Any], steps: int) -> Recipe:
    """The recipe of a leg: the way's drafter, a constant rate after the first steps, the data of the whole run."""
    made = recipe.model_dump()
    made["name"] = f"{recipe.name}-adopt-{way.replace(' ', '-')}-{leg}"
    made["drafter"] = section
    made["train"] |= {"max_steps": steps, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": min(5, steps)}
    made["train"] |= {"save_strategy": "no"}
    legs = Recipe.model_validate(made)
    RunFolder(legs).read_from(RunFolder(recipe))
    return legs


def _sentence(point: Point) -> str:
    return (
        f"{point.way}, {point.seconds / 60:.1f} minutes, {point.steps} steps: tau {point.tau:.2f} "
        f"({point.low:+.2f} to {point.high:+.2f} beside it)"
    )


def show_adoption(found: Adoption, folder: Path) -> None:
    """Print tau by the minute, and the advice."""
    rows = [
        (
            point.way,
            f"{point.seconds / 60:.1f}",
            point.steps,
            f"{point.tau:.2f}",
            f"{point.low:+.2f} to {point.high:+.2f}",
        )
        for point in found.points
    ]
    print_table(("training", "minutes", "steps", "tau", "beside it as it is"), rows)
    console.print(f"{found.advice}\nPicture   {folder / PICTURE}", markup=False)


def _draw(found: Adoption, file: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.axhline(found.tau, color="#666666", linestyle="--", label="as it is")
    for colour, way in zip(COLOURS, (ON, ANEW), strict=False):
        points = [point for point in found.points if point.way == way]
        minutes = [point.seconds / 60 for point in points]
        axes.plot(minutes, [point.tau for point in points], "o-", color=colour, label=way)
        low, high = ([found.tau + getattr(p, end) for p in points] for end in ("low", "high"))
        axes.fill_between(minutes, low, high, color=colour, alpha=0.15)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("tau on rows kept out")
    axes.set_title(f"{found.recipe}: {Path(found.drafter).name or found.drafter} beside this target")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=140)
    plt.close(figure)
