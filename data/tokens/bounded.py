"""Limits of time, memory and output for chat templates, which are untrusted programs.

transformers' sandbox keeps them from files and the network, but lets them loop for ever, or double a string until
memory is full. While a template runs, a second thread checks it, and raises in its thread if it exceeds a limit.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sized
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from draftsmith.errors import UserError

WITHIN_S = 20.0  # CPU time of its thread; the longest conversation takes a tenth of a second
MOST_GROWTH_BYTES = 2 << 30  # growth of this process while the template runs
MOST_CHARACTERS = 32 << 20  # length of the template's output: four of the longest conversations
LOOKS_EVERY_S = 0.05
RAISE_AGAIN_AFTER_S = 1.0  # if something in between caught the exception
STATUS = Path("/proc/self/statm")  # Linux only; on other systems the size of this process is not checked
PAGE_BYTES = 4096

Written = TypeVar("Written", bound=Sized)


class EndlessTemplate(UserError):
    """Error for a chat template that ran too long, used too much memory or wrote too much text."""

    def __init__(self) -> None:
        super().__init__(
            f"the target's chat template does not end within {WITHIN_S:g} s, {MOST_GROWTH_BYTES >> 30} GiB of memory "
            f"and {MOST_CHARACTERS >> 20} million characters: look at it, or set target.chat_template to one you trust"
        )


def bounded(write: Callable[[], Written]) -> Written:
    """Run a chat template, `write`, with limits of time, memory and length; return its text or tokens.

    Raises:
        EndlessTemplate: The template exceeds a limit of time, memory or length.
    """
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(threading.get_ident(), ended), name="template", daemon=True)
    watch.start()
    try:
        try:
            written = write()
        finally:
            ended.set()
            watch.join()
            for _ in range(2):  # an exception that the other thread has just raised surfaces here, not later
                pass
    except EndlessTemplate:
        ended.set()  # again, if the exception interrupted the first call
        raise
    if len(written) > MOST_CHARACTERS:
        raise EndlessTemplate
    return written


def _watch(thread: int, ended: threading.Event) -> None:
    """Check a thread's template until it has ended; raise `EndlessTemplate` in the thread if it exceeds a limit."""
    began_s, began_bytes = _spent_s(thread), _size_bytes()
    while not ended.wait(LOOKS_EVERY_S):
        if _spent_s(thread) - began_s > WITHIN_S or _size_bytes() - began_bytes > MOST_GROWTH_BYTES:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(EndlessTemplate))
            ended.wait(RAISE_AGAIN_AFTER_S)


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
