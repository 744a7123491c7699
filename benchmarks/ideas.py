"""What is each idea of the block drafters worth? One at a time, on the embedded target.

    python benchmarks/ideas.py [section.key=value ...]

On top of ParallelSpec: two ways for the target's features to go in (`into_inputs`: beside the tokens' embeddings,
ParallelSpec's, of three layers; `as_keys`: as keys and values of every layer, DFlash's, of five) times one layer or
three, times without and with a Markov head, all trained as `embedded-dspark` says (loss, depth weights, learning rate,
steps) on the same tokens. Beside them the recipes that this begins and ends with: ParallelSpec on final features and on
inner ones as it is shipped, and DSpark, which has a confidence head too; and P-EAGLE with and without a Markov head.

The table is in `runs/ideas`; its methods are `VARIANT/SHAPE`. What is trained is not trained again. One option at a
time, such as a loss, needs no script: `draftsmith compare quickstart --vary drafter.options.loss=ce,kl`.
"""

import argparse
import itertools

from draftsmith.eval.commands.compare import compare
from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import MethodRecipe, Recipe

SHIPPED = ("embedded-parallel", "quickstart", "embedded-dspark", "embedded-peagle")
AS_DSPARK = ["drafter.options.loss=kl", "drafter.options.depth_weights=0.78", "train.learning_rate=2.0e-3"]
BLOCK = ["drafter.options.block_size=5", "drafter.options.sample_from_anchor=true"]
WAYS_IN = {"into_inputs": ("quickstart", AS_DSPARK), "as_keys": ("embedded-dflash", [*AS_DSPARK, *BLOCK])}
LAYERS = (1, 3)
RANK = 64
METHODS = [
    MethodRecipe(name="chain", tree="chain"),
    MethodRecipe(name="tree", tree="best_first", nodes=12, branch=4),
]


def variants() -> dict[str, tuple[str, list[str]]]:
    """Return the recipe and the values of each variant by its name."""
    found: dict[str, tuple[str, list[str]]] = {name: (name, []) for name in SHIPPED}
    for (way, (recipe, values)), layers, markov in itertools.product(WAYS_IN.items(), LAYERS, (False, True)):
        own = [f"drafter.options.num_layers={layers}", f"drafter.options.markov_rank={RANK if markov else 0}"]
        found[f"{way}-{layers}{'-markov' if markov else ''}"] = (recipe, [*values, *own])
    found["peagle-markov"] = ("embedded-peagle", [f"drafter.options.markov_rank={RANK}"])
    return found


def recipes_of(overrides: list[str]) -> list[Recipe]:
    """Load each variant under its name, measured by the same questions, chain and tree."""
    recipes = []
    for name, (recipe, values) in variants().items():
        loaded = load_recipe(recipe, [*values, *overrides, f"name={name}"])
        evaluation = loaded.eval.model_copy(update={"methods": METHODS, "untimed_questions": 0})
        recipes.append(loaded.model_copy(update={"eval": evaluation}))
    return recipes


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value for all of them")
    parser.add_argument("--name", default="ideas", help="the folder of the common table under runs_dir")
    options = parser.parse_args()
    command = " ".join(["python benchmarks/ideas.py", *options.overrides])
    compare(recipes_of(options.overrides), options.name, command)


if __name__ == "__main__":
    main()
