"""Checks of the launch, one process or several under DDP, and its errors in sentences.

`accelerate launch` and `torchrun` set environment variables, which the Trainer reads.
"""

import atexit
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import distributed

from draftsmith.errors import TERMINATED_EXIT_CODE, UserError, reason
from draftsmith.models.weights import is_out_of_memory
from draftsmith.recipes.run_folder import MPI_WORLD_SIZES, RANKS, environment_number, is_first_process

# Libraries that split a model, which accelerate announces by a variable, or a recipe by a key of `train`.
SPLITTERS = {
    "ACCELERATE_USE_FSDP": "fsdp",
    "ACCELERATE_USE_DEEPSPEED": "deepspeed",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
# Messages of gloo, whose errors have no separate type; those of NCCL and the store are `DistError`.
GLOO_ERRORS = ("gloo/", "Connection closed by peer", "Connection reset by peer")
# What accelerate's own config puts into the environment, and the recipe's key that decides in its place.
DECIDED_BY_RECIPE = {
    "ACCELERATE_MIXED_PRECISION": "train.bf16",
    "ACCELERATE_DYNAMO_BACKEND": "train.torch_compile",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "train.global_batch_size",
    "ACCELERATE_GRADIENT_CLIPPING": "train.max_grad_norm",
}
LAUNCHERS = (*RANKS, *MPI_WORLD_SIZES, "LOCAL_", "MASTER_", "ACCELERATE_", "PARALLELISM_CONFIG_")  # prefixes
logger = logging.getLogger(__name__)


def let_recipe_decide(values: Mapping[str, Any]) -> None:
    """Remove environment variables that would change the training: of accelerate's config, of another launch, empty.

    Args:
        values: The recipe's section `train`.

    Raises:
        UserError: A launcher's variables name several processes, but not the address where these meet; a variable is
            not a number; or the model would be split among processes.
    """
    for name in [name for name, value in os.environ.items() if name.startswith(LAUNCHERS) and not value.strip()]:
        del os.environ[name]  # accelerate would read it as a number
    for name, key in SPLITTERS.items():
        if values.get(key) or _is_set(name):
            raise UserError(
                f"training does not support {key}, which splits a model among processes: leave train.{key} out and "
                "launch with recipes/accelerate/multi_gpu.yaml, by DDP; a target that does not fit is served by vLLM, "
                "with data.features.source=server"
            )
    for name, key in DECIDED_BY_RECIPE.items():
        value = os.environ.pop(name, "no").lower()
        if value not in ("no", "none", "auto", "1", "") and not values.get(value) and is_first_process():
            logger.warning("%s=%s is not used: %s in the recipe decides", name, value, key)
    for name in ("WORLD_SIZE", *MPI_WORLD_SIZES):
        if environment_number(name) > 1 and "MASTER_ADDR" not in os.environ:
            raise UserError(
                f"{name}={os.environ[name]} says that a launcher has started several processes, and no MASTER_ADDR "
                f"says where they meet: unset {name} to train in one process, or start several by `accelerate launch` "
                "or `torchrun`"
            )
    for name in RANKS:
        if "MASTER_ADDR" not in os.environ or "WORLD_SIZE" not in os.environ:
            os.environ.pop(name, None)
        environment_number(name, least=0)


@contextmanager
def awaiting_processes(processes: int) -> Iterator[None]:
    """Print that this process waits for the others of its launch; SIGTERM and Ctrl-C end it in this context.

    The signals have the system's handlers meanwhile, as Python's do not run while torch waits. Nothing is printed if
    torchrun has started all processes on this machine.
    """
    is_alone = processes < 2 and "LOCAL_RANK" not in os.environ  # with it torch waits for a launch of one process too
    if is_alone or threading.current_thread() is not threading.main_thread():
        yield
        return
    place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    if "TORCHELASTIC_RUN_ID" not in os.environ or environment_number("LOCAL_WORLD_SIZE") != processes:
        print(f"waiting for {processes} process(es) at {place}; Ctrl-C ends this one", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@functools.cache
def leave_at_exit() -> None:
    """Make gloo's process group end before the interpreter; call it after `TrainingArguments` has created the group.

    Otherwise a gloo thread that frees a tensor later needs the interpreter's lock and aborts the process (pytorch
    #179291), whatever its exit code. NCCL's group, whose end may wait for other processes, is left to torch.
    """
    atexit.register(_leave)


def _leave() -> None:
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


class LostProcess(UserError):
    """Error: another process of the training ended. The same command resumes it, as after a SIGTERM."""

    exit_code = TERMINATED_EXIT_CODE


@contextmanager
def errors_in_sentences() -> Iterator[None]:
    """Turn out-of-memory errors and errors of communication between processes into messages for the user.

    Raises:
        UserError: Memory ran out.
        LostProcess: A collective operation failed, because another process of the training has ended.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise UserError(
                f"out of memory ({reason(error)}): lower train.per_device_train_batch_size (train.global_batch_size "
                "keeps the rows of a step), and delete the run's folder `drafter` or use another `name`; `draftsmith "
                "plan RECIPE --measure` has the size of each part"
            ) from None
        if not isinstance(error, distributed.DistError) and not any(part in str(error) for part in GLOO_ERRORS):
            raise
        raise LostProcess(
            "another process of this training has ended, see its output (killed by the system, out of memory, a "
            "lost machine): run the same command again to resume from the last checkpoint"
        ) from None
