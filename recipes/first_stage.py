"""The recipe that `drafter.init` names: the first stage of a training in two.

Its drafter and training are its own. Target, data, seed and `runs_dir` are those of the recipe that names it, so both
stages learn from the same tokens, and overrides of these hold for both.
"""

from pathlib import Path

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import SEED_SUFFIX, Recipe

RECIPE_SUFFIXES = (".yaml", ".yml")


def first_stage(recipe: Recipe) -> Recipe | None:
    """The recipe to be trained first; None if `drafter.init` is absent, a folder or a Hub id.

    A `train.seed` holds for both stages; where it is not the recipe's `seed`, as in a comparison over seeds, the first
    stage's name says so in the way that the comparison's do, and is shared with it.

    Raises:
        UserError: There is no such recipe, or recipes start from each other in a circle.
    """
    return _first_stage(recipe, (recipe.name,))


def _first_stage(recipe: Recipe, names: tuple[str, ...]) -> Recipe | None:
    init = recipe.drafter.init
    if init is None or not _names_recipe(init):
        return None
    try:
        first = load_recipe(init)
    except UserError as error:
        raise UserError(f"key `drafter.init`: {error}") from None
    same = {key: getattr(recipe, key) for key in ("runs_dir", "seed", "target", "data")}
    train, number = first.train, 0
    seed = recipe.train.get("seed")
    if isinstance(seed, int):
        train, number = {**train, "seed": seed}, seed - recipe.seed
    name = f"{first.name}{SEED_SUFFIX}{number}" if number else first.name
    first = first.model_copy(update={**same, "train": train, "name": name})
    if name in names:
        raise UserError(f"key `drafter.init`: {' starts from '.join((*names, name))}: give one a start of its own")
    _first_stage(first, (*names, name))  # to find a circle before any training
    return first


def _names_recipe(init: str) -> bool:
    """A folder goes before a shipped recipe of its name; a bare name cannot be anything else."""
    if Path(init).is_dir():
        return False
    return init.endswith(RECIPE_SUFFIXES) or "/" not in init
