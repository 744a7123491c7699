"""Processes that end with the one that started them, however that ends: SIGKILL leaves nobody to stop them."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


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
