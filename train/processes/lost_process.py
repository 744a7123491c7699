"""What is said when another process of the training is gone: a sentence in place of a transport's error."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed
from torch.distributed.checkpoint import CheckpointException

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.signals import TERMINATED_EXIT_CODE

# Of gloo, whose errors have no type of their own; NCCL's and the store's are `DistError`.
OF_GLOO = ("gloo/", "Connection closed by peer", "Connection reset by peer")


class LostProcess(UserError):
    """Another process ended. It is nobody's mistake: the same command goes on, as after a SIGTERM."""

    exit_code = TERMINATED_EXIT_CODE


@contextmanager
def told_of_a_lost_process() -> Iterator[None]:
    """
    Raises:
        LostProcess: A collective of these processes failed in here.
    """
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        if not isinstance(error, distributed.DistError) and not any(part in str(error) for part in OF_GLOO):
            raise
        raise LostProcess(
            "another process of this training ended, as its own output says (killed by the system, out of memory, a "
            "machine gone): run the same command again to go on from the last checkpoint"
        ) from None
