"""Experiment trackers (`train.report_to`): additions to transformers' callbacks.

The callbacks log all curves by depth. In addition, a tracked run has the whole recipe in its config, is resumed as the
same run after an interruption, is stored in the run folder if the tracker stores it on disk, and ends before the
process's next training starts. `trackers.json` records the tracker's run, to which the evaluation's table is added
later.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from draftsmith.errors import UserError, did_you_mean, masked
from draftsmith.files import read_json, write_atomically
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

TRACKERS_FILE = "trackers.json"
TENSORBOARD_FOLDER = "tensorboard"
KNOWN = ("tensorboard", "trackio", "wandb")  # which the evaluation's table goes to as well


def check_trackers(names: list[str]) -> None:
    """Check that the trackers are known and installed.

    Raises:
        UserError: transformers does not know a tracker, or it is not installed.
    """
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            hint = did_you_mean(name, INTEGRATION_TO_CALLBACK, f"use {', '.join(KNOWN)}")
            raise UserError(f"key `train.report_to`: unknown tracker {name}: {hint}")
        if name in KNOWN and importlib.util.find_spec(name) is None:
            raise UserError(f"key `train.report_to`: {name} is not installed: `pip install 'draftsmith[{name}]'`")


@contextmanager
def tracked(recipe: Recipe, trainer: Trainer) -> Iterator[None]:
    """Track a training in this context, which encloses `trainer.train` and later logging.

    Raises:
        UserError: A tracker cannot start, for example without an API key.
    """
    args = trainer.args
    if not args.report_to or not trainer.is_world_process_zero():
        yield
        return
    folder, resolved = RunFolder(recipe), masked(recipe.model_dump())
    args.run_name = args.run_name or recipe.name
    trackers = [name for name in KNOWN if name in args.report_to]
    about = {"trackers": trackers, "name": args.run_name, "project": args.project}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = callback.logging_dir or str(folder.root / TENSORBOARD_FOLDER)
            about["tensorboard_folder"] = callback.logging_dir
    run = None
    if "wandb" in trackers:
        run = begin_wandb(folder, about | tracked_run(folder))
        run.config.update({"recipe": resolved}, allow_val_change=True)
        about["wandb_id"] = run.id
    write_atomically(folder.root / TRACKERS_FILE, json.dumps(about, indent=2) + "\n")
    trainer.add_callback(RecipeInTrackers(resolved, about))
    try:
        yield
    finally:
        if run is not None:
            run.finish()
        if "trackio" in trackers:
            end_trackio()


def tracked_run(folder: RunFolder) -> dict[str, Any]:
    """Return what `trackers.json` says; nothing where no training was tracked."""
    file = folder.root / TRACKERS_FILE
    if not file.exists():
        return {}
    return read_json(file, dict[str, Any], "delete it: the next training is then tracked as a separate run")


def begin_wandb(folder: RunFolder, about: dict[str, Any]) -> Any:
    """Begin a wandb run in this process: the earlier one, if there was one.

    Raises:
        UserError: wandb refuses.
    """
    import wandb  # an optional dependency

    folder.root.mkdir(parents=True, exist_ok=True)
    project, name, number = os.getenv("WANDB_PROJECT", about["project"]), about["name"], about.get("wandb_id")
    try:
        return wandb.init(project=project, name=name, id=number, resume="allow", dir=str(folder.root))
    except wandb.errors.Error as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"wandb cannot start ({said}): run `wandb login`, or set WANDB_MODE=offline in the environment"
        ) from None


def end_trackio() -> None:
    """End the open run if there is one; its callback opens another one for records logged after the last step."""
    import trackio  # an optional dependency

    if trackio.context_vars.current_run.get() is not None:
        trackio.finish()


class RecipeInTrackers(TrainerCallback):
    """Callback that adds the recipe to a tracker's run, which transformers' callbacks have started before."""

    def __init__(self, resolved: dict[str, Any], about: dict[str, Any]) -> None:
        self._resolved, self._about = resolved, about

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if "tensorboard" in self._about["trackers"]:
            from torch.utils.tensorboard import SummaryWriter

            lines = yaml.safe_dump(self._resolved, sort_keys=False, allow_unicode=True).splitlines()
            with SummaryWriter(self._about["tensorboard_folder"]) as writer:
                writer.add_text("recipe", "\n".join(f"    {line}" for line in lines), state.global_step)  # a code block
        if "trackio" in self._about["trackers"]:
            import trackio

            trackio.config.update({"recipe": self._resolved}, allow_val_change=True)
