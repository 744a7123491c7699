"""Processes that end with their parent, even if it is killed by SIGKILL."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """End this spawned process when its parent ends; call it first in the process.

    The process may be killed at any time: stages write their files atomically.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a process that multiprocessing spawned has a parent to end with"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def end_program_with_parent() -> None:
    """Make the Linux kernel end this child when its parent ends; pass it as `preexec_fn` to `subprocess.Popen`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
