"""A learning-rate schedule that ends on time, and snapshots while training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from draftsmith.recipes.target_schema import ScheduleSection
from draftsmith.train.drafter.interrupt import largest_of_all_processes


class TrainingClock(TrainerCallback, ExportableState):
    """Counts training seconds over all resumed runs and says how far the training is.

    Progress is the larger of steps done and minutes used, so the decay reaches zero at whichever end comes first.
    """

    def __init__(self, max_steps: int, max_minutes: float, elapsed_s: float = 0.0) -> None:
        self.max_steps = max_steps
        self.max_minutes = max_minutes
        self.elapsed_s = elapsed_s
        self._last_s: float | None = None

    def state(self) -> dict[str, Any]:
        arguments = {"max_steps": self.max_steps, "max_minutes": self.max_minutes}
        return {"args": arguments, "attributes": {"elapsed_s": self.elapsed_s}}

    def tick(self) -> None:
        now_s = time.monotonic()
        if self._last_s is not None:
            self.elapsed_s += now_s - self._last_s
        self._last_s = now_s

    def progress(self, step: int) -> float:
        return min(1.0, max(step / self.max_steps, self.elapsed_s / (60 * self.max_minutes)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last_s = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.tick()
        # The same clock in every process: they must decay alike and stop at the same step.
        self.elapsed_s = largest_of_all_processes(self.elapsed_s)
        if self.progress(state.global_step) >= 1.0:
            control.should_training_stop = True
            control.should_save = True
        return control


class SnapshotCallback(TrainerCallback):
    """Calls `export()` every `every_minutes` of training."""

    def __init__(self, clock: TrainingClock, every_minutes: float, export: Callable[[], None]) -> None:
        self.clock = clock
        self.every_s = 60 * every_minutes
        self.export = export
        self._next_s = self.every_s

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.clock.elapsed_s >= self._next_s:
            self._next_s = self.clock.elapsed_s + self.every_s
            self.export()


def rate_multiplier(clock: TrainingClock, schedule: ScheduleSection) -> Callable[[int], float]:
    """Linear warmup by steps, a plateau, then a linear decay to 0 over the last `decay_frac` of the progress."""

    def multiplier(step: int) -> float:
        warmup = min(1.0, (step + 1) / (schedule.warmup_steps + 1))
        return min(warmup, (1.0 - clock.progress(step)) / schedule.decay_frac)

    return multiplier
