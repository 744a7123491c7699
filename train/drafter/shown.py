"""Progress display of training: a panel on a terminal, elsewhere a short line per record.

    step 240/788  loss 3.27  acc 58/44/36/30/27 %  4,600 tok/s  12 min left
    step 240/788  held-out: loss 3.41  acc 55/41/33/28/25 %  tau 2.31

All figures in full precision are in `training.json` and go to the trackers.
"""

import sys
import time
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SPARKS = "▁▂▃▄▅▆▇█"
LINE_WIDTH, BAR_WIDTH = 32, 40
REDRAWN_EVERY_S = 0.25
HELD_OUT_PREFIX = "eval_"


class ShownTraining(TrainerCallback):
    """Callback that displays the records of `Trainer.log`, in the first process.

    Args:
        console: Console for the panel; None: print lines to stdout, for a log file.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._live = None if console is None else Live(console=console, auto_refresh=False)
        self._logs: list[dict[str, float]] = []
        self._held_out: dict[str, float] = {}
        self._begun_s = self._drawn_s = 0.0
        self._begun_step = 0

    @staticmethod
    def create() -> "ShownTraining":
        """Create the callback, with a live panel if stdout and stderr are a terminal."""
        return ShownTraining(Console(stderr=True) if sys.stderr.isatty() and sys.stdout.isatty() else None)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self._begun_s, self._begun_step = time.monotonic(), state.global_step
        self._logs = [log for log in state.log_history if "loss" in log]  # of a resumed training
        if self._live is not None and state.is_world_process_zero:
            self._live.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if time.monotonic() - self._drawn_s > REDRAWN_EVERY_S:
            self._draw(state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if not logs or not state.is_world_process_zero:
            return
        if f"{HELD_OUT_PREFIX}loss" in logs:
            self._held_out = {**logs, "step": state.global_step}
        elif "loss" in logs:
            self._logs.append({key: float(value) for key, value in logs.items()})
        else:  # the summary that the Trainer ends with, which the report tells
            return
        if self._live is None:
            print(f"step {state.global_step}/{state.max_steps}  {line_of(logs, self._left_s(state))}", flush=True)
        else:
            self._draw(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self._draw(state)
        self.stop()

    def stop(self) -> None:
        """Stop the live display; the panel's last state stays on the terminal."""
        if self._live is not None:
            self._live.stop()

    def _left_s(self, state: TrainerState) -> float | None:
        """Return the remaining seconds at this run's speed; None before the first step."""
        done = state.global_step - self._begun_step
        if done < 1:
            return None
        return (time.monotonic() - self._begun_s) / done * (state.max_steps - state.global_step)

    def _draw(self, state: TrainerState) -> None:
        if self._live is not None and self._live.is_started:
            self._drawn_s = time.monotonic()
            self._live.update(panel(state, self._logs, self._held_out, self._left_s(state)), refresh=True)


def line_of(logs: dict[str, float], left_s: float | None) -> str:
    """Format a record in one line; with the remaining time unless it is of held-out examples."""
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
    """Return (depth, value) of the keys with this prefix, ascending by depth."""
    found = ((key.removeprefix(prefix), float(value)) for key, value in logs.items() if key.startswith(prefix))
    return sorted((int(depth), value) for depth, value in found if depth.isdigit())


def span(seconds: float) -> str:
    """Format seconds as `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def sparks(values: list[float]) -> str:
    """Draw values as a line of bars from their minimum to their maximum, the newest last; many values are averaged."""
    if not values:
        return ""
    step = max(1.0, len(values) / LINE_WIDTH)
    cut = [int(place * step) for place in range(min(len(values), LINE_WIDTH))] + [len(values)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cut) if b > a]
    least, most = min(means), max(means)
    scale = (len(SPARKS) - 1) / (most - least) if most > least else 0.0
    return "".join(SPARKS[round((value - least) * scale)] for value in means)


def panel(state: TrainerState, logs: list[dict[str, float]], held_out: dict[str, float], left_s: float | None) -> Group:
    """Build the panel: progress, loss and accuracy of each depth so far, and the held-out figures."""
    newest = logs[-1] if logs else {}
    first = Table.grid(padding=(0, 2))
    status = [f"step {state.global_step:,}/{state.max_steps:,}"]
    status += [f"{newest['tokens_per_s']:,.0f} tok/s"] if "tokens_per_s" in newest else []
    status += [] if left_s is None else [f"{span(left_s)} left"]
    first.add_row(ProgressBar(total=max(1, state.max_steps), completed=state.global_step, width=BAR_WIDTH), *status)
    curves = Table.grid(padding=(0, 2))
    if newest:
        curves.add_row("loss", f"{newest['loss']:.2f}", Text(sparks([log["loss"] for log in logs]), style="yellow"))
    for depth, value in by_depth(newest, "accuracy_depth"):
        key = f"accuracy_depth{depth}"
        line = sparks([log[key] for log in logs if key in log])
        curves.add_row(f"depth {depth}", f"{100 * value:.0f} %", Text(line, style="green"))
    rows: list[Any] = [first, curves]
    if held_out:
        rows.append(Text(f"step {held_out['step']:,.0f}, {line_of(held_out, None)}", style="cyan"))
    return Group(*rows)
