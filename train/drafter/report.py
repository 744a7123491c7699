"""`drafter/training.json`: what training did. It is written last, so where it is, training is finished."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from draftsmith.models.base.registry import TRAINING_FILE


@dataclass(frozen=True)
class TrainReport:
    """What the file says. `loss` and `depth_accuracy` are the last that were logged, on training rows."""

    folder: Path
    steps: int
    epochs: float | None = None
    tokens: int = 0
    wall_time_s: float = 0.0
    batch_size: int = 0
    rows: int | None = None
    target_change: str | None = None
    loss: float = float("nan")
    depth_accuracy: list[float] = field(default_factory=list)
    was_finished: bool = True

    @staticmethod
    def read(folder: Path, was_finished: bool = True) -> "TrainReport":
        """Of a drafter's folder.

        Args:
            was_finished: Before this run, which had nothing to do.
        """
        metrics = json.loads((folder / TRAINING_FILE).read_text(encoding="utf-8"))
        known = {key: metrics[key] for key in (each.name for each in fields(TrainReport)) if key in metrics}
        last: dict[str, float] = next((entry for entry in reversed(metrics["history"]) if "loss" in entry), {})
        depths = sorted(int(key.removeprefix("accuracy_depth")) for key in last if key.startswith("accuracy_depth"))
        accuracies = [last[f"accuracy_depth{depth}"] for depth in depths]
        loss = last.get("loss", float("nan"))
        return TrainReport(folder, **known, loss=loss, depth_accuracy=accuracies, was_finished=was_finished)

    def sentence(self) -> str:
        """One sentence for the terminal."""
        accuracy = ", ".join(f"{value:.0%}" for value in self.depth_accuracy)
        last = (
            f"last loss {self.loss:.3f}, accuracy at depths 1-{len(self.depth_accuracy)} on training rows: {accuracy}"
        )
        if self.was_finished:
            return f"{self.folder} is already trained with these settings ({self.steps} steps; {last}): nothing to do"
        speed = f"{self.tokens / max(self.wall_time_s, 1e-9):,.0f} tokens/s"
        return f"trained {self.folder} in {self.steps} steps, {self.wall_time_s:.0f} s, {speed}; {last}"
