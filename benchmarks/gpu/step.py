"""Base of the steps: command line, sizes for a rehearsal on a CPU, and a file of figures, written with each figure."""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from parts.timing import Work, seconds

from draftsmith.files import write_atomically

T = TypeVar("T")
ERROR = ".error"  # behind the name of a part: its traceback
SKIPPED = ".skipped"  # behind the name of a part: why it was left out
LONGEST_S = 3600.0  # of a step without a limit
MOST_CHARACTERS = 6000  # of a traceback


class Step:
    """One step of the benchmark.

    Args:
        name: Name of its file of figures, `FOLDER/NAME.json`.
        device: A CPU is a rehearsal, at sizes that take seconds.
        folder: Folder of all results.
        limit_s: Seconds after which the process will be killed.
        part: What to do of the step, if several processes share it.
    """

    def __init__(
        self, name: str, device: torch.device, folder: Path, limit_s: float = LONGEST_S, part: str | None = None
    ) -> None:
        self.name, self.device, self.folder, self.part_name = name, device, folder.absolute(), part
        self.on_gpu = device.type == "cuda"
        self.figures: dict[str, Any] = {}
        self.failed: list[str] = []
        self._end_s = time.monotonic() + limit_s
        self.folder.mkdir(parents=True, exist_ok=True)

    def size(self, on_gpu: T, in_rehearsal: T) -> T:
        """Return the first value on a GPU, the second one in a rehearsal."""
        return on_gpu if self.on_gpu else in_rehearsal

    @property
    def left_s(self) -> float:
        """Return the seconds that are left of the step's limit."""
        return self._end_s - time.monotonic()

    def add(self, key: str, value: Any) -> None:
        """Add a figure, or replace it, and write the file: a process that is killed leaves its figures."""
        self.figures[key] = value
        text = json.dumps(self.figures, indent=1, default=str)
        write_atomically(self.folder / f"{self.name}.json", text + "\n")
        print(f"{self.name}.{key}: {str(value)[:600]}", flush=True)

    @contextmanager
    def part(self, key: str) -> Iterator[None]:
        """Continue after any error in a part of the step; its traceback is the figure `key.error`."""
        try:
            yield
        except Exception:
            self.failed.append(key)
            self.add(key + ERROR, traceback.format_exc()[-MOST_CHARACTERS:])
        self.free()

    def has_time(self, key: str, needed_s: float) -> bool:
        """Return True if a part has as many seconds as it needs; otherwise add the figure `key.skipped`."""
        if self.left_s >= needed_s:
            return True
        self.add(key + SKIPPED, f"needs {needed_s:.0f} s, {self.left_s:.0f} s are left")
        return False

    def median_s(self, work: Work, calls: int, warmup: int = 3) -> float:
        """Return the median seconds of a call, from an idle device to an idle device."""
        for _ in range(warmup):
            work()
        return median(seconds(work, self.device) for _ in range(calls))

    def free(self) -> None:
        """Free unused memory of the device."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def run_step(main: Callable[[Step], None]) -> None:
    """Run a step as a process; exit code 1 if a part of it failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("part", nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, default=time.time() + LONGEST_S, help="seconds since the epoch")
    options = parser.parse_args()
    limit_s = options.until - time.time()  # less what the imports have taken
    step = Step(options.name, torch.device(options.device), options.out, limit_s, options.part)
    with step.part("step"):
        main(step)
    sys.exit(1 if step.failed else 0)
