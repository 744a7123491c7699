"""One measurement after the other: one that fails is noted down with its error, and the next is made."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parts.shapes import Shape
from parts.timing import give_memory_back

MOST_CHARACTERS = 2000


@dataclass
class Suite:
    """The measurements of one part.

    Args:
        shape: Sizes to measure at.
        end_s: On the clock. A measurement is not begun when less is left than the longest one took so far.
        figures: By the measurement's name.
        errors: What failed, likewise.
        left_out: Names of the measurements that there was no time for.
    """

    shape: Shape
    device: torch.device
    end_s: float
    clock: Callable[[], float] = time.monotonic
    figures: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _longest_s: float = 0.0

    def run(self, part: Callable[["Suite"], None]) -> "Suite":
        """Make all measurements of a part; an error between them ends it."""
        self._guarded("part", part, self)
        return self

    def measure(self, name: str, work: Callable[..., Any], *inputs: Any) -> None:
        """Note down what `work` returns for the inputs, or its error."""
        begin_s = self.clock()
        if begin_s + self._longest_s > self.end_s:
            self.left_out.append(name)
            return
        value = self._guarded(name, work, *inputs)
        self._longest_s = max(self._longest_s, self.clock() - begin_s)
        if value is not None:
            self.figures[name] = value
        give_memory_back(self.device)

    def _guarded(self, name: str, work: Callable[..., Any], *inputs: Any) -> Any:
        try:
            return work(*inputs)
        except Exception as error:
            said = " ".join(str(error).split())[:MOST_CHARACTERS]
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.errors[name] = f"{type(error).__name__}: {said} ({Path(frame.filename).name}:{frame.lineno})"
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            return None
