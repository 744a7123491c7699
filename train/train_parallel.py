"""Train a drafter, in one process or many.

    accelerate launch -m draftsmith.train.train_parallel recipes/quickstart.yaml [section.key=value ...]
    python -m draftsmith.train.train_parallel recipes/quickstart.yaml train.learning_rate=1e-3

Reads `runs/<name>/data/tokens` (made by `draftsmith distill`), writes `runs/<name>/drafter`. Run it again after an
interruption: it resumes from the last checkpoint.
"""

import argparse
import os

from draftsmith.errors import exit_with_one_sentence
from draftsmith.progress import configure_progress_bars
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import is_first_process


@exit_with_one_sentence()
def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train the recipe's drafter.")
    parser.add_argument("recipe", help="a recipe's YAML file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the recipe's")
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, options.overrides)

    # DDP looks for unused weights, as a batch may have no label of a depth; torch would warn wherever all are used.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with configure_progress_bars():
        # torch and transformers, after a mistyped recipe was reported
        from draftsmith.train.drafter.stage import train_drafter

        report = train_drafter(recipe)
    if is_first_process():
        print(report.sentence())


if __name__ == "__main__":
    main()
