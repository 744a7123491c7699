"""What is each idea of the later drafters worth? One at a time, on the embedded target.

    python benchmarks/ideas.py [--of blocks|losses|norms]

`blocks`, on top of ParallelSpec: two ways for the target's features to go in (`into_inputs`: beside the tokens'
embeddings, ParallelSpec's, of three layers; `as_keys`: as keys and values of every layer, DFlash's, of five) times one
layer or three, times without and with a Markov head, all trained as `embedded-dspark` says (loss, depth weights,
learning rate, steps) on the same tokens. Beside them the recipes that this begins and ends with: ParallelSpec on final
features and on inner ones as it is shipped, and DSpark, which has a confidence head too; and P-EAGLE with and without a
Markov head.

`losses`: the quickstart's ParallelSpec with each loss in place of cross entropy, and D-PACE (its paper's alpha) in
place of depth weights, there and in DSpark. `norms`: EAGLE-3 with each of EAGLE-3.1's two norms, and with both.

The table is in `runs/ideas`, `runs/losses` or `runs/norms`; its methods are `VARIANT/SHAPE`. What is trained is not
trained again.
"""

import argparse
import itertools
from collections.abc import Callable

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
LOSSES = ("kl", "lk_alpha", "lk_lambda")
DPACE = "drafter.options.dpace_alpha=0.5"
NORMS = {"fc_norm": ["fc_norm"], "norm_output": ["norm_output"], "3.1": ["fc_norm", "norm_output"]}
FOLDERS = {"blocks": "ideas", "losses": "losses", "norms": "norms"}
METHODS = [
    MethodRecipe(name="chain", tree="chain"),
    MethodRecipe(name="tree", tree="best_first", nodes=12, branch=4),
]

Variants = dict[str, tuple[str, list[str]]]  # recipe and values of each, by name


def blocks() -> Variants:
    found: Variants = {name: (name, []) for name in SHIPPED}
    for (way, (recipe, values)), layers, markov in itertools.product(WAYS_IN.items(), LAYERS, (False, True)):
        own = [f"drafter.options.num_layers={layers}", f"drafter.options.markov_rank={RANK if markov else 0}"]
        found[f"{way}-{layers}{'-markov' if markov else ''}"] = (recipe, [*values, *own])
    found["peagle-markov"] = ("embedded-peagle", [f"drafter.options.markov_rank={RANK}"])
    return found


def losses() -> Variants:
    found: Variants = {"quickstart": ("quickstart", [])}
    found |= {f"quickstart-{loss}": ("quickstart", [f"drafter.options.loss={loss}"]) for loss in LOSSES}
    found["quickstart-dpace"] = ("quickstart", [DPACE])
    return found | {"embedded-dspark": ("embedded-dspark", []), "embedded-dspark-dpace": ("embedded-dspark", [DPACE])}


def norms() -> Variants:
    found: Variants = {"embedded-eagle3": ("embedded-eagle3", [])}
    for name, options in NORMS.items():
        found[f"embedded-eagle3-{name}"] = ("embedded-eagle3", [f"drafter.options.{option}=true" for option in options])
    return found


VARIANTS: dict[str, Callable[[], Variants]] = {"blocks": blocks, "losses": losses, "norms": norms}


def recipes_of(which: str, overrides: list[str]) -> list[Recipe]:
    """Load each variant under its name, measured by the same questions, chain and tree."""
    recipes = []
    for name, (recipe, values) in VARIANTS[which]().items():
        loaded = load_recipe(recipe, [*values, *overrides, f"name={name}"])
        evaluation = loaded.eval.model_copy(update={"methods": METHODS, "untimed_questions": 0})
        recipes.append(loaded.model_copy(update={"eval": evaluation}))
    return recipes


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value for all of them")
    parser.add_argument("--of", choices=VARIANTS, default="blocks", help="which ideas")
    parser.add_argument("--name", help="the folder of the common table under runs_dir")
    options = parser.parse_args()
    chosen = [] if options.of == "blocks" else ["--of", options.of]
    command = " ".join(["python benchmarks/ideas.py", *chosen, *options.overrides])
    compare(recipes_of(options.of, options.overrides), options.name or FOLDERS[options.of], command)


if __name__ == "__main__":
    main()
