"""`draftsmith search`: the same small budget of trials for every recipe, so that a comparison compares drafters.

A trial is the recipe with other values of what is tuned, the same keys and ranges for every kind that has them, trained
for a few steps with a schedule that ends there, on the recipe's data without the rows that are kept out. Its score is
the tau of the recipe's trees on those rows, replayed (`replay`): the mean over its methods.

The first trial is the recipe as it is. The others are drawn: learning rates spread evenly on a logarithmic scale (van
der Corput's sequence), the rest by the trial's number. So more trials begin with the same ones, and what was trained
before is found in its folder, `runs/<name>-trial-<number>-of-<steps>-steps`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.data.distill.token_dataset import load_tokens
from draftsmith.eval.commands.console import console, print_table
from draftsmith.eval.commands.stages import make_drafter, reuse_data, run_distill
from draftsmith.eval.decoding.method import Method
from draftsmith.eval.methods.drafter import drafter_method
from draftsmith.eval.trees.verify import DraftTree, Sampling
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter, load_drafter_class
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import first_stage
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import DRAFTER_KIND, Recipe
from draftsmith.train.drafter.rows import answers_in, split_rows
from draftsmith.train.drafter.stage import train_drafter

LEARNING_RATE_RANGE = (0.25, 4.0)  # times the recipe's
# Options of drafters that weigh losses or say where weights begin, where a kind has them.
CHOICES: dict[str, tuple[float | str, ...]] = {
    "class_weight": (0.1, 0.3, 1.0),
    "depth_weights": (0.5, 0.8, 1.0),
    "depth_ramp": (0.0, 0.3, 0.6),
    "init": ("target", "random"),
}
EVAL_ROWS_FRAC = 0.05  # where the recipe keeps none out


@dataclass(frozen=True)
class SearchBudget:
    """Hold the trials of each recipe, the optimiser steps of each trial, and the rows that it is scored on."""

    trials: int
    steps: int
    rows: int


@dataclass(frozen=True)
class Trial:
    """Hold what was tried, and what came of it: tau by method, and their mean."""

    number: int
    values: dict[str, float | str]
    taus: dict[str, float]
    score: float
    last_loss: float
    accuracy: list[float]
    wall_time_s: float


@dataclass(frozen=True)
class Search:
    """Hold the trials of one recipe; `chosen` are the values of the best one, as recipe keys."""

    recipe: str
    kind: str
    budget: SearchBudget
    trials: list[Trial]
    chosen: dict[str, float | str]


def search_recipe(recipe: Recipe, budget: SearchBudget, others: Sequence[Recipe] = ()) -> Search:
    """Train and score every trial that is not trained yet.

    Args:
        others: Recipes whose distilled conversations this one takes where it asks for the same ones.

    Raises:
        UserError: The drafter changes its target, so that the known answers are not its target's; or no method of the
            recipe has a drafter; or a stage's own.
    """
    if not _scored_methods(recipe):
        raise UserError(
            f"recipe {recipe.name} has no method with a drafter of its own to score: add one to eval.methods"
        )
    kind = load_drafter_class(recipe.drafter.kind)
    if kind.target_change is not Drafter.target_change:
        raise UserError(f"{recipe.drafter.kind} changes its target, whose known answers are not its own: use `compare`")
    reuse_data(recipe, others)
    run_distill(recipe)
    target, _ = load_target(recipe.target)
    trials = []
    for number in range(budget.trials):
        values = trial_values(recipe, number)
        trial = trial_recipe(recipe, number, values, budget.steps)
        RunFolder(trial).read_from(RunFolder(recipe))
        first = first_stage(trial)
        if first is not None:
            make_drafter(first)
        report = train_drafter(trial)
        taus = score(trial, target, budget.rows)
        mean = sum(taus.values()) / len(taus)
        trials.append(Trial(number, values, taus, mean, report.loss, report.heldout_accuracy, report.wall_time_s))
        print(f"trial {number}: {_text(values) or 'the recipe'}: tau {mean:.3f}", flush=True)
    best = max(trials, key=lambda trial: trial.score)
    return Search(recipe.name, recipe.drafter.kind, budget, trials, best.values)


def trial_values(recipe: Recipe, number: int) -> dict[str, float | str]:
    """Draw values of the keys that are tuned, by recipe key; none for the recipe itself, number 0."""
    if number == 0:
        return {}
    low, high = LEARNING_RATE_RANGE
    # Van der Corput's sequence in (0, 1): 1/2, 1/4, 3/4, 1/8, 5/8, ...
    digits = f"{number:b}"
    place = int(digits[::-1], 2) / 2 ** len(digits)
    learning_rate = recipe.train.get("learning_rate", 5e-5) * low ** (1 - place) * high**place
    values: dict[str, float | str] = {"train.learning_rate": float(f"{learning_rate:.3g}")}
    generator = random.Random(number)
    known = load_drafter_class(recipe.drafter.kind).config_class.Options.model_fields
    for key, choices in CHOICES.items():
        drawn = generator.choice(choices)  # for all kinds, so that those with the same keys try the same values
        if key in known:
            values[f"drafter.options.{key}"] = drawn
    return values


def trial_recipe(recipe: Recipe, number: int, values: dict[str, float | str], steps: int) -> Recipe:
    """Make the recipe of a trial: other values, fewer steps, rows kept out, a folder of its own."""
    trial = recipe.model_dump()
    trial["name"] = f"{recipe.name}-trial-{number}-of-{steps}-steps"
    trial["train"]["max_steps"] = steps
    trial["data"]["eval_rows_frac"] = recipe.data.eval_rows_frac or EVAL_ROWS_FRAC
    for key, value in values.items():
        section = trial["train"] if key.startswith("train.") else trial["drafter"]["options"]
        section[key.rpartition(".")[2]] = value
    return Recipe.model_validate(trial)


def score(trial: Recipe, target: PreTrainedModel, rows: int) -> dict[str, float]:
    """Return the tau of each of the recipe's trees with the trial's drafter, on rows kept out of its training."""
    drafter = load_drafter(RunFolder(trial).drafter, target)
    _, kept_out = split_rows(load_tokens(RunFolder(trial), trial.name), trial.data.eval_rows_frac)
    assert kept_out is not None  # by `trial_recipe`
    parts = kept_out.select(range(min(rows, len(kept_out)))).with_format("torch", columns=["input_ids", "loss_mask"])
    read = []
    for row in parts:
        ids_s = row["input_ids"].to(target.device, dtype=int)
        features_sf = target_features(target, ids_s[None], layers=drafter.feature_layers)[0]
        read.append((ids_s, row["loss_mask"], features_sf))
    decoder = drafter.decoder(max(len(ids_s) for ids_s, _, _ in read) + drafter.config.num_depths + 1)
    taus = {}
    for method in _scored_methods(trial):
        tau = replay(drafter_method(method, decoder, Sampling()), read)
        if tau is None:
            raise UserError("the rows kept out of training hold no answer: raise data.eval_rows_frac")
        taus[method.name] = tau
    return taus


def show_search(search: Search) -> None:
    """Print a table, best first."""
    rows = [
        (trial.number, _text(trial.values) or "the recipe's own", f"{trial.score:.3f}",
         ", ".join(f"{share:.0%}" for share in trial.accuracy), f"{trial.last_loss:.3f}", f"{trial.wall_time_s:.0f}")
        for trial in sorted(search.trials, key=lambda trial: -trial.score)
    ]  # fmt: skip
    print_table(("trial", "values", "tau", "accuracy, kept out", "loss", "s"), rows)
    best = _text(search.chosen) or "the values of the recipe itself"
    console.print(f"{search.recipe}: best with {best}", markup=False)


def _scored_methods(recipe: Recipe) -> list[Any]:
    """Return the methods with trees that the drafter alone decides."""
    own = (method for method in recipe.eval.methods if method.kind == DRAFTER_KIND and method.drafter is None)
    return [method for method in own if method.tree != "tuned" and not method.lookup]


def _text(values: dict[str, float | str]) -> str:
    return " ".join(f"{key}={value if isinstance(value, str) else f'{value:g}'}" for key, value in values.items())


@torch.inference_mode()
def replay(method: Method, rows: Iterable[tuple[Tensor, Tensor, Tensor]]) -> float | None:
    """Draft through every answer of every row, at T = 0 without the target; tau over all rounds, None without any.

    Self-distilled answers are what the target would say after every token, and one forward over a row gives the
    features of all rounds. Ties aside, rounds are those of `decoding/loop.py`; where the data were sampled, tau is that
    of following the sample.

    Args:
        rows: Token ids [S], loss mask [S], 1 at the tokens of answers, and the features [S, F] that the method reads.
    """
    lengths: list[int] = []
    for ids_s, mask_s, features_sf in rows:
        for first, last in answers_in(mask_s.tolist()):
            if first and last > first:
                lengths += accepted_lengths(method, ids_s.tolist(), features_sf, first, last)
    return sum(lengths) / len(lengths) if lengths else None


def accepted_lengths(method: Method, ids: list[int], features_sf: Tensor, first: int, last: int) -> list[int]:
    """Count the tokens that each round commits, the target's own included, of the answer from `first` to `last`."""
    method.start(ids[:first], features_sf[:first])
    method.observe([ids[first]], features_sf[first - 1 : first])
    newest, lengths = first, []
    while newest < last:
        tree = method.propose().cut_to_depth(last - newest - 1)
        committed = _accepted(tree, ids[newest + 1 :]) + 1
        lengths.append(committed)
        if newest + committed < last:
            method.observe(ids[newest + 1 : newest + 1 + committed], features_sf[newest : newest + committed])
        newest += committed
    return lengths


def _accepted(tree: DraftTree, following: list[int]) -> int:
    """Count how many of the tokens that follow the root are in the tree, from the root on."""
    node, accepted = 0, 0
    while (child := next((c for c in tree.children(node) if tree.tokens[c] == following[accepted]), None)) is not None:
        node, accepted = child, accepted + 1
        if accepted == len(following):
            break
    return accepted
