"""Processes that end with the one that started them, however that ends: SIGKILL leaves nobody to stop them."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """End this process, a spawned one, once its parent is gone; to be called first in it.

    What a stage writes is written whole or not at all, so that this may happen at any moment.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a process that multiprocessing spawned has a parent to end with"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def end_program_with_parent() -> None:
    """Let the kernel end another program with this one, on Linux; for `preexec_fn` of `subprocess.Popen`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
