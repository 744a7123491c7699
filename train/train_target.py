"""Trains the embedded target: `accelerate launch train/train_target.py recipes/target.yaml`, also plain `python`.

Then writes its model card with measured figures. Ctrl-C saves a checkpoint; the same command goes on from there.
"""

import argparse
import logging
from pathlib import Path

from draftsmith.recipes.loading import load_yaml_as
from draftsmith.recipes.target_schema import EmbeddedTargetRecipe
from draftsmith.train.embedded_target.card import measure_target, write_target_card
from draftsmith.train.embedded_target.run import train_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--output-dir", type=Path, help="where the finished checkpoint goes")
    parser.add_argument("--work-dir", type=Path, help="where checkpoints to resume from go")
    parser.add_argument("--snapshot-dir", type=Path, help="also export a usable model here while training")
    parser.add_argument("--max-minutes", type=float, help="wall-clock budget; the learning rate decays towards its end")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = load_yaml_as(EmbeddedTargetRecipe, arguments.recipe)
    recipe.output_dir = arguments.output_dir or recipe.output_dir
    recipe.work_dir = arguments.work_dir or recipe.work_dir
    recipe.schedule.max_minutes = arguments.max_minutes or recipe.schedule.max_minutes
    training_note = train_target(recipe, arguments.snapshot_dir)
    if training_note:
        write_target_card(recipe.output_dir, measure_target(recipe.output_dir), training_note)


if __name__ == "__main__":
    main()
