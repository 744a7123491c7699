"""When the phases of a round began: read off the host's clock, or, on a GPU, off events in its queue.

An event costs the host nothing and waits for nothing; it says when the device came to it. What the device idles while
the host works counts to the phase that the host is in then.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch


class PhaseClock(Protocol):
    """mark: now; seconds: of all marks, from any beginning, once the device has come to the last."""

    def mark(self) -> None: ...

    def seconds(self) -> list[float]: ...


class HostClock:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return self._marks


class DeviceClock:
    """See the module's docstring."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._events.append(event)

    def seconds(self) -> list[float]:
        return [self._events[0].elapsed_time(event) / 1000 for event in self._events]


def phase_clock(device: torch.device) -> PhaseClock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
