"""Ctrl-C and SIGTERM in training: end after the step at work, with a checkpoint, so that nothing computed is lost."""

import signal
import threading
import time
from types import FrameType
from typing import Any, NoReturn

import torch
from transformers import TrainerCallback, TrainerControl

from draftsmith.recipes.signals import Terminated

# A terminal's Ctrl-C reaches the launcher too, which passes it on: the same one, twice.
SAME_SIGNAL_S = 1.0


class StopOnInterrupt(TrainerCallback):
    """The first SIGINT or SIGTERM saves and stops after the current step, in all processes of a distributed run.

    A second Ctrl-C acts at once. A second SIGTERM does not: schedulers and launchers send several, and what cannot wait
    any longer is killed. `requested` says afterwards whether training was stopped.
    """

    def __init__(self) -> None:
        self.requested = False
        self._signal, self._since_s = 0, 0.0
        self._previous: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may handle signals
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._request)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        # The largest of the processes' signals; SIGTERM is larger than SIGINT.
        self._signal = int(largest_of_all_processes(self._signal or int(self.requested) * signal.SIGINT))
        self.requested = self._signal != 0
        if self.requested:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.restore()

    def raise_interrupt(self) -> NoReturn:
        """What the command ends with, when all is saved."""
        raise Terminated if self._signal == signal.SIGTERM else KeyboardInterrupt

    def _request(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.requested and number == signal.SIGINT and now_s - self._since_s > SAME_SIGNAL_S:
            self.restore()
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._signal, self._since_s = True, number, now_s

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
