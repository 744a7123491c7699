"""SIGTERM, as schedulers and `docker stop` send it, does what Ctrl-C does, and nothing swallows either."""

import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED_EXIT_CODE, TERMINATED_EXIT_CODE = 130, 143  # 128 + the signal's number, as shells say it
AGAIN_S = 0.02
INTERRUPTED = "interrupted: run the same command again to continue where it stopped"


class Terminated(KeyboardInterrupt):
    """SIGTERM ended a training that a scheduler may start again: everything is saved."""


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """In here both signals raise `KeyboardInterrupt`, but while a library is imported they end the process at once.

    One that Python raised where nothing can catch it (in a weak reference's callback, of which loading a model has
    thousands) is raised again elsewhere.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    _give_forked_workers_their_own_end()
    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, _terminate)}
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in a background job of a shell
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupt)
    others_hook = sys.unraisablehook

    def raise_again(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            others_hook(unraisable)
            return
        timer = threading.Timer(AGAIN_S, terminate_again)
        timer.daemon = True
        timer.start()

    def terminate_again() -> None:
        if sys.unraisablehook is raise_again:  # else all is done
            os.kill(os.getpid(), signal.SIGTERM)

    sys.unraisablehook = raise_again
    try:
        yield
    finally:
        sys.unraisablehook = others_hook
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if any("importlib._bootstrap" in each.f_code.co_filename for each, _ in traceback.walk_stack(frame)):
        # Libraries have an `except:` around their optional parts. What is done so far is on disk.
        print(INTERRUPTED, file=sys.stderr, flush=True)
        os._exit(INTERRUPTED_EXIT_CODE)
    raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    at_ctrl_c = signal.getsignal(signal.SIGINT)  # training has its own way to stop
    (at_ctrl_c if callable(at_ctrl_c) else _interrupt)(number, frame)


@functools.cache
def _give_forked_workers_their_own_end() -> None:
    """A pool ends its workers by SIGTERM. One that comes right after the fork would be forgotten with a handler."""
    if hasattr(os, "register_at_fork"):
        both = (signal.SIGTERM, signal.SIGINT)
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, both),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, both),
            after_in_child=_be_a_worker,
        )


def _be_a_worker() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
