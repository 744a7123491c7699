"""`drafter/training.json`: what training did. It is written last, so where it is, training is finished."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.models.base.registry import Training, read_training


@dataclass
class TrainReport(Training):
    """What the file says, of a drafter's folder. `was_finished`: before this run, which had nothing to do."""

    folder: Path = Path()
    was_finished: bool = True

    @staticmethod
    def read(folder: Path, was_finished: bool = True) -> "TrainReport":
        return TrainReport(**vars(read_training(folder)), folder=folder, was_finished=was_finished)

    @property
    def last_log(self) -> dict[str, float]:
        """The last loss and accuracies that were logged, on training rows."""
        return next((entry for entry in reversed(self.history) if "loss" in entry), {})

    @property
    def loss(self) -> float:
        return self.last_log.get("loss", float("nan"))

    @property
    def depth_accuracy(self) -> list[float]:
        names = (f"accuracy_depth{depth}" for depth in range(1, len(self.last_log) + 1))
        return [self.last_log[name] for name in names if name in self.last_log]

    def sentence(self) -> str:
        """One sentence for the terminal."""
        accuracy = ", ".join(f"{value:.0%}" for value in self.depth_accuracy)
        depths = f"accuracy at depths 1-{len(self.depth_accuracy)} on training rows: {accuracy}"
        last = f"last loss {self.loss:.3f}, {depths}"
        if self.was_finished:
            return f"{self.folder} is already trained with these settings ({self.steps} steps; {last}): nothing to do"
        speed = f"{self.tokens / max(self.wall_time_s, 1e-9):,.0f} tokens/s"
        return f"trained {self.folder} in {self.steps} steps, {self.wall_time_s:.0f} s, {speed}; {last}"
