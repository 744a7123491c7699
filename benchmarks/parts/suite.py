"""One measurement after the other. One that fails is noted down with its error, and the next goes on.

Each is written to disk when it is done, and each part runs in a process of its own, which is ended when the time is up:
neither a crash, nor an error that a CUDA context never recovers from, nor a time limit costs what was measured before.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.recipes.run_folder import write_atomically
from parts.shapes import Shape
from parts.timing import give_memory_back

TAIL_CHARACTERS = 2000
GRACE_S = 10.0  # that a part has beyond its time, to end by itself


@dataclass
class Findings:
    """What a part found: figures by the measurement's name, errors likewise, and what there was no time for."""

    figures: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


class Suite:
    """Of one part.

    Args:
        file: Where the findings go, after every measurement.
        end_s: On the clock. Where less is left than the longest measurement took so far, the next is not begun.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        file: Path,
        end_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape, self.device = shape, device
        self.findings = Findings()
        self._file, self._end_s, self._clock = file, end_s, clock
        self._longest_s = 0.0

    def run(self, part: Callable[["Suite"], None]) -> Findings:
        """The whole part; what fails between its measurements ends it."""
        self._guarded("part", part, self)
        return self.findings

    def measure(self, name: str, work: Callable[..., Any], *inputs: Any) -> Any:
        """Note down what `work` gives of the inputs, or why it gives nothing; None then."""
        begin_s = self._clock()
        if begin_s + self._longest_s > self._end_s:
            self.findings.left_out.append(name)
            self._write()
            return None
        value = self._guarded(name, work, *inputs)
        self._longest_s = max(self._longest_s, self._clock() - begin_s)
        if value is not None:
            self.findings.figures[name] = value
        give_memory_back(self.device)
        self._write()
        return value

    def _guarded(self, name: str, work: Callable[..., Any], *inputs: Any) -> Any:
        try:
            return work(*inputs)
        except Exception as error:
            self.findings.errors[name] = described(error)
            traceback.clear_frames(error.__traceback__)  # which hold tensors
        self._write()
        return None

    def _write(self) -> None:
        write_atomically(self._file, json.dumps(asdict(self.findings)))


def described(error: BaseException) -> str:
    """Its kind, the beginning of what it says, and the line that raised it."""
    said = " ".join(str(error).split())[:TAIL_CHARACTERS]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {said} ({Path(frame.filename).name}:{frame.lineno})"


def run_apart(command: list[str], file: Path, limit_s: float) -> Findings:
    """A part in a process of its own, which writes its findings to `file`; they are kept however it ends."""
    error = None
    # A group of its own, so that what it starts ends with it.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, said = process.communicate(timeout=limit_s + GRACE_S)
        if process.returncode:
            error = f"exit code {process.returncode}: {said.strip()[-TAIL_CHARACTERS:]}"
    except subprocess.TimeoutExpired:
        error = f"stopped: its {limit_s:.0f} s were up"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    findings = Findings(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else Findings()
    if error is not None:
        findings.errors["process"] = error
    return findings
