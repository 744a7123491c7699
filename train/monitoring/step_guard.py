"""Looks at every step before the optimiser does: what is not finite ends the training, and a spike is written down.

A loss or a gradient that is NaN or infinite would be in all weights a step later, so the step is not taken: the newest
checkpoint and the weights stay what they were. A spike is a loss far above its recent ones, measured in the spread of
those by their median and their median distance from it, which one spike does not move.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from draftsmith.recipes.errors import UserError
from draftsmith.train.monitoring.suspect_batch import SuspectBatch

RECENT_STEPS = 50
FEWEST_STEPS = 20  # of which a spread can be told
SPIKE_SPREADS = 8.0
# The median distance from the median, of normal values, in standard deviations.
SPREAD_OF_DISTANCE = 1.4826
SMALLEST_SPREAD_FRAC = 0.01  # of the median: a loss that does not move has no spread
KEPT_SPIKES = 20  # whose rows are written down


class StepGuard(TrainerCallback, ExportableState):
    """Told of a step's micro-batches, then of the loss of each and of the gradient's norm; judges between them.

    Args:
        folder: Where the rows of suspect steps are written.
        dataset: That these come from.
        mean: A tensor's mean over all processes.
        log: Into the training's log, and to its trackers.
    """

    def __init__(
        self, folder: Path, dataset: Any, mean: Callable[[Tensor], Tensor], log: Callable[[dict[str, float]], None]
    ) -> None:
        self.recent_losses: list[float] = []
        self.spikes = 0
        self._folder, self._dataset, self._mean, self._log = folder, dataset, mean, log
        self._micro_batches: Sequence[dict[str, Tensor]] = ()
        self._losses: list[Tensor] = []
        self._gradient_norm: Tensor | float | None = None

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"args": {}, "attributes": {"recent_losses": self.recent_losses, "spikes": self.spikes}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())  # of a checkpoint older than this class

    def begin(self, micro_batches: Sequence[dict[str, Tensor]]) -> None:
        self._micro_batches, self._losses, self._gradient_norm = micro_batches, [], None

    def add_loss(self, loss: Tensor) -> None:
        """Of a micro-batch, as it enters the gradient's mean over processes."""
        self._losses.append(loss)

    def set_gradient_norm(self, norm: Tensor | float | None) -> None:
        """Over all processes."""
        self._gradient_norm = norm

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """
        Raises:
            UserError: The loss or the gradient is not finite, in any process.
        """
        if not self._losses:
            return
        losses = torch.stack(self._losses)
        norm = self._gradient_norm
        if norm is None or args.fp16:  # whose scaler skips steps with an infinite gradient
            norm = 0.0
        elif isinstance(norm, DTensor):
            norm = norm.full_tensor()
        judged = torch.stack([losses.sum().float(), torch.as_tensor(norm).to(losses.device).float()])
        loss, norm = self._mean(judged).tolist()  # the step's one wait for the device
        step = state.global_step + 1
        if not (isfinite(loss) and isfinite(norm)):
            file = self._write(step, args)
            raise UserError(self._sentence(step, loss, norm, file, args))
        usual, is_spike = self._judge(loss)
        if is_spike:
            self.spikes += 1
            self._log({"loss_spike": loss, "loss_usual": round(usual, 4), "gradient_norm_at_spike": norm})
            if self.spikes <= KEPT_SPIKES:
                self._write(step, args)
        self.recent_losses = [*self.recent_losses, loss][-RECENT_STEPS:]
        self._micro_batches = ()  # to be freed before the next ones are fetched

    def _judge(self, loss: float) -> tuple[float, bool]:
        """The usual loss, and whether this one is a spike."""
        if len(self.recent_losses) < FEWEST_STEPS:
            return loss, False
        usual = median(self.recent_losses)
        distance = median(abs(recent - usual) for recent in self.recent_losses)
        spread = max(SPREAD_OF_DISTANCE * distance, SMALLEST_SPREAD_FRAC * abs(usual))
        return usual, loss > usual + SPIKE_SPREADS * spread

    def _write(self, step: int, args: Any) -> Path:
        losses = [float(loss) for loss in self._losses]
        batch = SuspectBatch(step, args.process_index, losses, self._micro_batches)
        return batch.write(self._folder, self._dataset)

    @staticmethod
    def _sentence(step: int, loss: float, norm: float, file: Path, args: Any) -> str:
        what = f"the loss is {loss}" if not isfinite(loss) else f"the gradient's norm is {norm}"
        half = "set target.dtype=bfloat16 (float16 overflows), " if args.fp16 else ""
        return (
            f"{what} in step {step}, which was not taken: its rows and their losses are in {file} (of this process); "
            f"{half}lower train.learning_rate or train.max_grad_norm under another `name`, or mend these rows"
        )
