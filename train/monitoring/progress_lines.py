"""Training's progress where there is no terminal: lines in a log file, in place of transformers' bar; or nothing."""

import sys
from contextlib import ExitStack
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from draftsmith.recipes.progress import Progress, is_quiet, progress_bar


class ProgressLines(TrainerCallback):
    """A line every so often, and each log as a line of its own, as transformers' bar has them."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._bar: Progress | None = None
        self._step = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self._step = state.global_step
            self._bar = self._open.enter_context(progress_bar(state.max_steps, "train", "step", initial=self._step))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._step)
            self._step = state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if state.is_world_process_zero and logs:
            print({key: value for key, value in logs.items() if key != "total_flos"}, flush=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._open.close()


def show_progress(trainer: Trainer) -> None:
    """On a terminal as transformers does; in a log file by lines; with `--quiet` not at all.

    `train.disable_tqdm` leaves the logs alone, as there.
    """
    if is_quiet():
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
    elif not sys.stderr.isatty() and trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(ProgressLines())
