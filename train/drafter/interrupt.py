"""Ctrl-C in training: end after the step at work, with a checkpoint, so that nothing computed is lost."""

import signal
import threading
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl


class StopOnInterrupt(TrainerCallback):
    """The first SIGINT or SIGTERM saves and stops after the current step, in all processes; a second one acts at once.

    `requested` says afterwards whether training was stopped.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may handle signals
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._request)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.requested = bool(largest_of_all_processes(self.requested))
        if self.requested:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.restore()

    def restore(self) -> None:
        """Give the signals back; at the end of training, and after an error that `on_train_end` does not see."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def largest_of_all_processes(value: float) -> float:
    """The maximum over a distributed run, whose processes must all ask; the value itself in a single process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    shared = torch.tensor(value, device=device, dtype=torch.float64)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return float(shared)
