"""Report of a training, read from `drafter/training.json`, which is written last, when training has finished."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.models.base.registry import Training, read_training
from draftsmith.train.drafter.shown import by_depth

WORTH_SAYING_FRAC = 0.05  # of the time


@dataclass
class TrainReport(Training):
    """Figures of a drafter's training, read from `training.json` in its folder.

    was_finished: whether training had finished before this call, which then trained nothing.
    """

    folder: Path = Path()
    was_finished: bool = True

    @staticmethod
    def read(folder: Path, was_finished: bool = True) -> "TrainReport":
        return TrainReport(**vars(read_training(folder)), folder=folder, was_finished=was_finished)

    @property
    def last_log(self) -> dict[str, float]:
        """Return the last logged loss and accuracies on training examples, by the log's keys; empty without a log."""
        return next((entry for entry in reversed(self.history) if "loss" in entry), {})

    @property
    def heldout(self) -> dict[str, float]:
        """Return the figures of the saved weights on the held-out examples, by the log's keys; empty without them."""
        evaluations = [entry for entry in reversed(self.history) if "eval_loss" in entry]
        return next((entry for entry in evaluations if self.best_step in (None, entry["step"])), {})

    @property
    def heldout_accuracy(self) -> list[float]:
        """Return the share of correct draft tokens at each depth, on the held-out examples."""
        return [value for _, value in by_depth(self.heldout, "eval_accuracy_depth")]

    @property
    def heldout_tau(self) -> list[float]:
        """Return tau with greedy chains of 1, 2, ... draft tokens, on the held-out examples."""
        return [value for _, value in by_depth(self.heldout, "eval_tau_depth")]

    @property
    def loss(self) -> float:
        return self.last_log.get("loss", float("nan"))

    @property
    def depth_accuracy(self) -> list[float]:
        return [value for _, value in by_depth(self.last_log, "accuracy_depth")]

    def as_json(self) -> dict[str, Any]:
        """Return the main figures as JSON values for programs; the full log is in the folder's `training.json`."""
        kept = ("steps", "best_step", "epochs", "tokens", "wall_time_s", "rows", "batch_size")
        return {
            "folder": str(self.folder),
            "was_finished": self.was_finished,
            **{key: getattr(self, key) for key in kept},
            "loss": self.loss,
            "accuracy_by_depth": self.depth_accuracy,
            "heldout_accuracy_by_depth": self.heldout_accuracy,
            "heldout_tau_by_depth": self.heldout_tau,
        }

    def sentence(self) -> str:
        """Return a summary of the training in one sentence."""
        accuracy = ", ".join(f"{value:.0%}" for value in self.depth_accuracy)
        depths = f"accuracy at depths 1-{len(self.depth_accuracy)} on training rows: {accuracy}"
        last = f"last loss {self.loss:.3f}, {depths}"
        if self.heldout_tau:
            shares = ", ".join(f"{value:.0%}" for value in self.heldout_accuracy)
            number = f"{self.heldout_rows} " if self.heldout_rows else ""  # not recorded by earlier releases
            last += f"; on {number}held-out examples: {shares}, tau of a chain {self.heldout_tau[-1]:.2f}"
        if self.best_step not in (None, self.steps):
            last += f", with the weights of step {self.best_step}, the best there"
        if self.was_finished:
            return f"{self.folder} is already trained with these settings ({self.steps} steps; {last}): nothing to do"
        speed = f"{self.tokens / max(self.wall_time_s, 1e-9):,.0f} tokens/s"
        waited_frac = self.waited_for_batches_s / max(self.wall_time_s, 1e-9)
        waited = f" ({waited_frac:.0%} of the time waiting for rows)" if waited_frac >= WORTH_SAYING_FRAC else ""
        return f"trained {self.folder} in {self.steps} steps, {self.wall_time_s:.0f} s, {speed}{waited}; {last}"
