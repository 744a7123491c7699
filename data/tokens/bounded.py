"""Limits of time, memory and output for chat templates, which are untrusted programs.

transformers' sandbox keeps them from files and the network, but lets them loop for ever, or double a string until
memory is full. A watching thread, which lives while templates run, checks the running ones and raises in the thread of
a template that exceeds a limit.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import UserError

WITHIN_S = 20.0  # CPU time of its thread; the longest conversation takes a tenth of a second
MOST_GROWTH_BYTES = 2 << 30  # growth of this process while the template runs
MOST_CHARACTERS = 32 << 20  # length of the template's output: four of the longest conversations
LOOKS_EVERY_S = 0.05
RAISE_AGAIN_AFTER_S = 1.0  # if something in between caught the exception
WATCHES_ON_S = 2.0  # after the last run
STATUS = Path("/proc/self/statm")  # Linux only; on other systems the size of this process is not checked
PAGE_BYTES = 4096


class EndlessTemplate(UserError):
    """Error for a chat template that ran too long, used too much memory or wrote too much text."""

    def __init__(self) -> None:
        super().__init__(
            f"the target's chat template does not end within {WITHIN_S:g} s, {MOST_GROWTH_BYTES >> 30} GiB of memory "
            f"and {MOST_CHARACTERS >> 20} million characters: look at it, or set target.chat_template to one you trust"
        )


@dataclass
class _Run:
    """A template that is running in a thread.

    began_s: CPU seconds of the thread at the first check.
    began_bytes: size of the process at the last check before the start.
    raised_s: time at which the exception was raised in the thread.
    """

    thread: int
    began_bytes: int
    began_s: float | None = None
    raised_s: float = 0.0


class _Watchdog:
    """The running templates by number, and the thread that watches them."""

    def __init__(self) -> None:
        self._number = 0
        self.forget()
        os.register_at_fork(
            after_in_child=self.forget
        )  # a forked child has no watchdog thread, and may inherit a locked lock

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}
        self._thread: threading.Thread | None = None
        self._size_bytes = 0

    def begin(self) -> int:
        """Register a template run of this thread; returns its number."""
        with self._lock:
            self._number += 1
            if self._thread is None:
                self._size_bytes = _size_bytes()
                self._thread = threading.Thread(target=self._stop_long_runs, name="templates", daemon=True)
                self._thread.start()
            self._runs[self._number] = _Run(threading.get_ident(), self._size_bytes)
            return self._number

    def end(self, number: int) -> None:
        with self._lock:
            self._runs.pop(number, None)

    def _stop_long_runs(self) -> None:
        """Check the runs at intervals; raise `EndlessTemplate` in the thread of one that exceeds a limit."""
        idle_since_s = time.monotonic()
        while True:
            time.sleep(LOOKS_EVERY_S)
            with self._lock:
                self._size_bytes = _size_bytes()
                for run in self._runs.values():
                    if self._exceeds_limits(run) and time.monotonic() > run.raised_s + RAISE_AGAIN_AFTER_S:
                        run.raised_s = time.monotonic()
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(run.thread), ctypes.py_object(EndlessTemplate)
                        )
                if self._runs:
                    idle_since_s = time.monotonic()
                elif time.monotonic() > idle_since_s + WATCHES_ON_S:
                    self._thread = None
                    return

    def _exceeds_limits(self, run: _Run) -> bool:
        spent_s = _spent_s(run.thread)
        run.began_s = spent_s if run.began_s is None else run.began_s
        return spent_s - run.began_s > WITHIN_S or self._size_bytes - run.began_bytes > MOST_GROWTH_BYTES


def _spent_s(thread: int) -> float:
    """Return a thread's seconds on the processor, without those of a sleeping machine; else the clock's."""
    with suppress(AttributeError, OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def _size_bytes() -> int:
    """Return the resident size of this process; 0 if it is unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(STATUS.read_text().split()[1]) * PAGE_BYTES
    return 0


_watch = _Watchdog()


def bounded(write: Callable[[], str]) -> str:
    """Run a chat template, `write`, with limits of time, memory and length; return its text.

    Raises:
        EndlessTemplate: The template exceeds a limit of time, memory or length.
    """
    number = _watch.begin()
    try:
        try:
            text = write()
        finally:
            _watch.end(number)
            for _ in range(2):  # an exception that the watchdog has just raised surfaces here, not later
                pass
    except EndlessTemplate:
        _watch.end(number)  # again, if the exception interrupted the first call
        raise
    if len(text) > MOST_CHARACTERS:
        raise EndlessTemplate
    return text
