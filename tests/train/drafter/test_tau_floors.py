"""Every kind of drafter learns: after a short training the tau of its chains stays above a floor.

    pytest -m nightly -rP tests/train/drafter/test_tau_floors.py     # prints tau, and its interval over questions

The embedded target's own answers, 200 steps of each kind with AdamW, then chains over held-out answers at T = 0,
replayed through the kind's decoder. A mistake in training or decoding costs at least half of the accepted draft tokens;
another seed, or a processor with other rounding, a few per cent.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.cli.stages import run_distill
from draftsmith.data.distill.token_dataset import load_tokens
from draftsmith.eval.bench.replay import accepted_lengths
from draftsmith.eval.methods.drafter import TreeDrafter, tree_builder
from draftsmith.eval.report.bootstrap import QuestionSums, compute_ratio, interval, tau
from draftsmith.models.base.registry import drafter_kinds, load_drafter
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import MethodConfig, Recipe
from draftsmith.train.drafter.rows import answers_in, split_rows
from draftsmith.train.drafter.stage import train_drafter

# By kind: the floor, two half intervals below the tau measured with seed 0 (or 0.6 of its gain), and that tau.
FLOORS = {
    "dflash": (1.25, 1.377),
    "dflash2": (1.74, 2.092),
    "draft_model": (1.85, 2.202),
    "dspark": (2.07, 2.388),
    "eagle": (1.69, 1.964),
    "eagle3": (1.59, 1.948),
    "eagle_parallel": (1.52, 1.774),
    "hydra": (1.66, 1.956),
    "medusa": (1.58, 1.810),
    "medusa2": (1.58, 1.812),
    "parallel": (1.4, 1.541),
    "pass_embeddings": (1.9, 2.099),
    "peagle": (1.5, 1.676),
}
SETTING = (
    "train.optimizer=adamw", "train.muon_learning_rate=null", "data.conversations.limit=500",
    "data.distill.max_new_tokens=96", "data.distill.cut_answers=keep",
    "data.eval_rows_frac=0.1", "train.max_steps=200", "train.save_steps=1000",
)  # fmt: skip
LEARNING_RATES = {
    "dflash": 2e-3, "dflash2": 2e-3, "dspark": 2e-3, "eagle": 6e-3, "eagle_parallel": 6e-3, "peagle": 2e-3,
    "pass_embeddings": 1e-2,
}  # fmt: skip
# Medusa-2 first trains its heads alone; its change of the target must be trained too.
OPTIONS = {
    "dflash2": "{selector_rank: 64, selector_top_k: 12}",
    "draft_model": "{draft_depth: 4}",
    "dspark": "{markov_rank: 64}",
    "eagle_parallel": "{class_weight: 1.0}",
    "medusa2": "{warmup_steps: 100}",
    "parallel": "{mask_residual: true}",
    "peagle": "{num_layers: 3}",
}
MAX_LENGTH_TOKENS = 512 + 96


def floor_recipe(kind: str, runs_dir: Path, *overrides: str) -> Recipe:
    """Return a recipe of this kind on the embedded target with the settings of the floors."""
    own = f"drafter.options={OPTIONS.get(kind, '{}')}", f"train.learning_rate={LEARNING_RATES.get(kind, 4e-3)}"
    return load_recipe("quickstart", [f"runs_dir={runs_dir}", f"drafter.kind={kind}", *own, *SETTING, *overrides])


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Distil the answers that all kinds are trained on."""
    recipe = floor_recipe("parallel", tmp_path_factory.mktemp("floors"), "name=answers")
    run_distill(recipe)
    return recipe


def share_data(distilled: Recipe, recipe: Recipe) -> None:
    """Link another run's answers and tokens into this run."""
    folder = RunFolder(recipe)
    folder.root.mkdir(parents=True, exist_ok=True)
    folder.data.symlink_to(RunFolder(distilled).data, target_is_directory=True)


def trained_sums(recipe: Recipe) -> Iterator[tuple[int, int]]:
    """Train, and yield the tokens and the rounds of each held-out conversation's chains."""
    train_drafter(recipe)
    target, _ = load_target(recipe.target)
    drafter = load_drafter(RunFolder(recipe).drafter, target)
    decoder = drafter.decoder(MAX_LENGTH_TOKENS)
    chain = tree_builder(MethodConfig(name="chain"), decoder)
    method = TreeDrafter("chain", decoder, chain, Sampling())
    _, heldout = split_rows(load_tokens(RunFolder(recipe), recipe.name), recipe.data.eval_rows_frac)
    assert heldout is not None
    for row in heldout:
        ids_1s = torch.tensor([row["input_ids"]])
        features_sf: Tensor = target_features(target, ids_1s, layers=drafter.feature_layers)[0]
        lengths = [
            length
            for first, last in answers_in(list(row["loss_mask"]))
            for length in accepted_lengths(method, row["input_ids"], features_sf, first, last)
        ]
        yield sum(lengths), len(lengths)


def measured_tau(recipe: Recipe) -> tuple[float, list[float] | None]:
    """Return tau over all held-out answers, and its 95 % interval over conversations."""
    committed, rounds = np.array([each for each in trained_sums(recipe) if each[1]], dtype=np.float64).T
    ones = np.ones_like(rounds)
    sums = QuestionSums(committed, rounds, ones, ones, ones, ones)
    return compute_ratio(tau, sums), interval(tau, sums)


def test_every_kind_has_a_floor() -> None:
    """Half of the accepted draft tokens would be below it."""
    assert list(FLOORS) == drafter_kinds()
    for floor, measured in FLOORS.values():
        assert 1 + (measured - 1) / 2 < floor < measured


@pytest.mark.nightly
@pytest.mark.parametrize("kind", drafter_kinds())
def test_tau_stays_above_its_floor(kind: str, distilled: Recipe) -> None:
    recipe = floor_recipe(kind, Path(distilled.runs_dir))
    share_data(distilled, recipe)
    value, over_questions = measured_tau(recipe)
    print(f"{kind}: tau {value:.3f}, 95 % interval {over_questions}")
    assert value >= FLOORS[kind][0]
