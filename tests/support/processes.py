"""Processes of one training, as started by a launcher: gloo, on the CPU.

They are forked from a server that has imported everything and computed nothing, so they need no import time.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

from draftsmith.data.engines.server_process import free_port

PRELOADED = ["draftsmith.train.drafter.stage"]
LONGEST_S = 300.0


def run_in_processes(function: Callable[..., None], num_processes: int, *arguments: Any) -> None:
    """Call `function` in every process; raise if one fails.

    Args:
        function: A function of an importable module.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    failures = context.SimpleQueue()
    processes = [
        context.Process(target=_call, args=(failures, rank, num_processes, port, function, arguments))
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LONGEST_S)
        if process.is_alive():
            process.kill()
    failed = [] if failures.empty() else [failures.get()]
    assert [process.exitcode for process in processes] == [0] * num_processes, "".join(failed)


def _call(
    failures: Any, rank: int, num_processes: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes), "ACCELERATE_USE_CPU": "true",
        "LOCAL_WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    try:
        function(*arguments)
    except BaseException:
        failures.put(f"process {rank}: {traceback.format_exc()}")
        raise
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
