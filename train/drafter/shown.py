"""Progress display of training: a short line per record, and on a terminal transformers' bar below.

    step 240/788  loss 3.27  acc 58/44/36/30/27 %  4,600 tok/s  12 min left
    step 240/788  held-out: loss 3.41  acc 55/41/33/28/25 %  tau 2.31

All figures in full precision are in `training.json` and go to the trackers, which draw their curves.
"""

import time
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerState, TrainingArguments

HELD_OUT_PREFIX = "eval_"


class ShownTraining(TrainerCallback):
    """Callback that prints the records of `Trainer.log` to stdout, in the first process."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self._begun_s, self._begun_step = time.monotonic(), state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        # The summary that the Trainer ends with has neither; the report tells it.
        if logs and state.is_world_process_zero and {"loss", f"{HELD_OUT_PREFIX}loss"} & logs.keys():
            done, spent_s = state.global_step - self._begun_step, time.monotonic() - self._begun_s
            left_s = spent_s / done * (state.max_steps - state.global_step) if done else None
            line = f"step {state.global_step}/{state.max_steps}  {line_of(logs, left_s)}"
            with tqdm.external_write_mode():
                print(line, flush=True)


class TrainingBar(ProgressCallback):
    """transformers' progress bar, without the lines that it prints for logs."""

    def on_log(self, *_: Any, **__: Any) -> None:
        pass


def line_of(logs: dict[str, float], left_s: float | None) -> str:
    """Format a record of `Trainer.log` in one line; `left_s`, the remaining time, is for training records only."""
    prefix = HELD_OUT_PREFIX if f"{HELD_OUT_PREFIX}loss" in logs else ""
    parts = [f"{'held-out: ' if prefix else ''}loss {float(logs[f'{prefix}loss']):.2f}"]
    accuracy = [f"{100 * value:.0f}" for _, value in by_depth(logs, f"{prefix}accuracy_depth")]
    parts += [f"acc {'/'.join(accuracy)} %"] if accuracy else []
    taus = by_depth(logs, f"{prefix}tau_depth")
    parts += [f"tau {taus[-1][1]:.2f}"] if taus else []
    if not prefix:
        parts += [f"{logs['tokens_per_s']:,.0f} tok/s"] if "tokens_per_s" in logs else []
        parts += [] if left_s is None else [f"{span(left_s)} left"]
    return "  ".join(parts)


def by_depth(logs: dict[str, float], prefix: str) -> list[tuple[int, float]]:
    """Return (depth, value) of the log's keys that are `prefix` and a depth, ascending by depth."""
    found = ((key.removeprefix(prefix), float(value)) for key, value in logs.items() if key.startswith(prefix))
    return sorted((int(depth), value) for depth, value in found if depth.isdigit())


def span(seconds: float) -> str:
    """Format seconds as `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
