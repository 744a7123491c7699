"""Trains the embedded target: `accelerate launch train/train_target.py recipes/target.yaml`, also plain `python`.

Then writes its model card with measured figures. Ctrl-C saves a checkpoint; the same command goes on from there.
"""

import argparse
import json
import logging
from pathlib import Path

from draftsmith.recipes.errors import exit_with_one_sentence
from draftsmith.recipes.loading import load_yaml_as
from draftsmith.recipes.target_schema import EmbeddedTargetRecipe


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--output-dir", help="where the finished checkpoint goes")
    parser.add_argument("--work-dir", help="where checkpoints to resume from go")
    parser.add_argument("--snapshot-dir", type=Path, help="also export a usable model here while training")
    parser.add_argument("--max-minutes", type=float, help="wall-clock budget; the learning rate decays towards its end")
    options = parser.parse_args()
    given = {
        "output_dir": options.output_dir, "work_dir": options.work_dir, "schedule.max_minutes": options.max_minutes,
    }  # fmt: skip
    overrides = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    recipe = load_yaml_as(EmbeddedTargetRecipe, options.recipe, overrides)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    from draftsmith.train.embedded_target.card import measure_target, write_target_card
    from draftsmith.train.embedded_target.run import train_target

    training_note = train_target(recipe, options.snapshot_dir and options.snapshot_dir.expanduser())
    if training_note:
        write_target_card(recipe.output_dir, measure_target(recipe.output_dir), training_note)


if __name__ == "__main__":
    main()
