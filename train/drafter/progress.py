"""What training has done so far, over all the runs that went on from a checkpoint: seconds, tokens, and what is counted
since the last log.

Shapes: G depths.
"""

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from draftsmith.train.drafter.checkpoints import STATE_FILE


class Progress(TrainerCallback, ExportableState):
    """Saved with every checkpoint.

    tokens: trained on, of all processes; elapsed_s: in training, steps and what is between them; unlogged_3g: sums over
    labels since the last log: losses, correct ones, labels of each depth; logged: tokens and seconds of that log.
    """

    def __init__(self) -> None:
        self.tokens, self.elapsed_s = 0, 0.0
        self.unlogged_3g: list[list[float]] = []
        self.logged_tokens, self.logged_s = 0, 0.0
        self._last_s: float | None = None

    def state(self) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {"args": {}, "attributes": attributes}

    def add(self, tokens: int, sums_3g: list[list[float]]) -> None:
        """Count what was trained on since the last call."""
        self.tokens += tokens
        earlier = self.unlogged_3g or [[0.0] * len(row) for row in sums_3g]
        self.unlogged_3g = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(earlier, sums_3g, strict=True)]

    def take_log(self) -> dict[str, float]:
        """Means over the labels of each depth since the last log, and tokens per second."""
        logs: dict[str, float] = {}
        for depth, (loss, correct, count) in enumerate(zip(*self.unlogged_3g, strict=True), start=1):
            if count:
                logs[f"loss_depth{depth}"] = round(loss / count, 4)
                logs[f"accuracy_depth{depth}"] = round(correct / count, 4)
        seconds = max(self.elapsed_s - self.logged_s, 1e-9)
        logs["tokens_per_s"] = round((self.tokens - self.logged_tokens) / seconds, 1)
        self.unlogged_3g, self.logged_tokens, self.logged_s = [], self.tokens, self.elapsed_s
        return logs

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last_s = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pause()

    def pause(self) -> None:
        """What came since the last step was no training."""
        self._last_s = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        now_s = time.monotonic()
        self.elapsed_s += now_s - (self._last_s or now_s)
        self._last_s = now_s
        return control


def restore(callback: ExportableState, checkpoint: Path) -> None:
    """Go on counting from a checkpoint; one of an earlier version counted nothing."""
    saved = TrainerState.load_from_json(str(checkpoint / STATE_FILE)).stateful_callbacks
    for name, value in saved.get(type(callback).__name__, {}).get("attributes", {}).items():
        setattr(callback, name, value)
