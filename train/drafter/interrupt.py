"""Ctrl-C and SIGTERM in training: end after the current step, with a checkpoint, so that nothing computed is lost."""

import signal
import threading
import time
from types import FrameType
from typing import Any, NoReturn

import torch
from transformers import TrainerCallback, TrainerControl

from draftsmith.recipes.errors import Terminated

# A terminal's Ctrl-C reaches the launcher too, which passes it on: the same one, twice.
SAME_SIGNAL_S = 1.0


class StopOnInterrupt(TrainerCallback):
    """Saves and stops after the current step at the first SIGINT or SIGTERM, in all processes of a distributed run.

    A second Ctrl-C acts at once. A second SIGTERM does not: schedulers and launchers send several, and what cannot wait
    any longer is killed. `requested` is the signal, or 0.
    """

    def __init__(self) -> None:
        self.requested = 0
        self._since_s = 0.0
        self._previous: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # the only one that may handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.requested = _largest_of_all_processes(self.requested)  # SIGTERM is larger than SIGINT
        if self.requested:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Give the signals back; at the end of training, and after an error that `on_train_end` does not see."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def raise_interrupt(self) -> NoReturn:
        """End the command by what was requested, when all is saved."""
        raise Terminated if self.requested == signal.SIGTERM else KeyboardInterrupt

    def _request(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.requested and number == signal.SIGINT and now_s - self._since_s > SAME_SIGNAL_S:
            self.restore()
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._since_s = int(number), now_s


def _largest_of_all_processes(value: int) -> int:
    """The maximum over a distributed run, whose processes must all ask; the value itself in a single process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    shared = torch.tensor(value, device=device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return int(shared)
