"""`torch.compile` as decoding uses it: one graph for each shape, no graph breaks, CUDA graphs where there is CUDA."""

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from draftsmith.recipes.errors import UserError

BACKEND = "inductor"
MOST_SHAPES = 64  # of one function, in one process


def can_compile() -> bool:
    """Whether there is a compiler of C++, which inductor and Triton ask for."""
    return any(map(shutil.which, ("c++", "g++", "clang++")))


def compiled(
    function: Callable[..., Any], device: torch.device, what: str, backend: str = BACKEND
) -> Callable[..., Any]:
    """The function, compiled anew for every shape of its tensors; `what` names it to the user.

    On CUDA its results lie in memory that the next call of any compiled function may reuse: copy what is kept longer.

    Raises (when it is called):
        UserError: It cannot be compiled.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_SHAPES)
    on_cuda = device.type == "cuda"
    mode = "reduce-overhead" if on_cuda and backend == BACKEND else None
    fast = torch.compile(function, fullgraph=True, dynamic=False, backend=backend, mode=mode)

    def call(*inputs: Any) -> Any:
        if on_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            return fast(*inputs)
        except TorchDynamoException as error:
            raise UserError(
                f"{what} cannot be compiled on this machine ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}): use eval.compile=false"
            ) from error

    return call
