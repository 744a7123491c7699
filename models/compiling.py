"""`torch.compile` as decoding uses it: no graph breaks; CUDA graphs where there is CUDA, elsewhere one graph for all.

Compiled code is cached in `$DRAFTSMITH_CACHE`, so that a second process loads it in seconds.
"""

import os
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from draftsmith.errors import UserError
from draftsmith.files import cache_root
from draftsmith.models.cpu_kernels import cpp_compiler
from draftsmith.progress import progress_bar

BACKEND = "inductor"
MOST_SHAPES = 64  # of one function, in one process
FIRST_CALLS = 3  # on CUDA: warm up, record a graph, replay it
SWITCH = "DRAFTSMITH_COMPILE"  # 0: nothing is compiled unless a recipe asks for it


def compiles_by_default(device: torch.device) -> bool:
    """Return True if decoding is compiled here by default: small operations take longer to call than to compute.

    It takes a C++ compiler, which inductor and Triton need; and `$DRAFTSMITH_COMPILE` is not 0.
    """
    return device.type in ("cpu", "cuda") and os.environ.get(SWITCH) != "0" and cpp_compiler() is not None


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function. Compiled code is stored with its code: without guards another closure would run it."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def padded_rows(rows: int) -> int:
    """Return the next power of two: few shapes, and at most twice the rows, which cost little."""
    return 1 << (rows - 1).bit_length()


def allow_many_shapes() -> None:
    """Raise torch's limit of compilations of one function, beyond which it silently runs uncompiled."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_SHAPES)


def compiled(
    function: Callable[..., Any],
    device: torch.device,
    what: str,
    backend: str = BACKEND,
    dynamic: Sequence[tuple[int, int, int]] | None = None,
) -> Callable[..., Any]:
    """Compile a function; `what` names it to the user.

    On CUDA its results are in memory that the next call of any compiled function may reuse: copy what is kept longer.

    Args:
        dynamic: (input, dimension, most) of the sizes that differ from call to call, 2 at least: one graph serves all
            of them, and nothing else about a call is looked at. None: compiled again for every shape of its tensors.

    Raises (when it is called):
        UserError: It cannot be compiled.
    """
    allow_many_shapes()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "inductor"))
    on_cuda = device.type == "cuda"
    if dynamic is None:
        mode = "reduce-overhead" if on_cuda and backend == BACKEND else None
        fast = torch.compile(function, fullgraph=True, dynamic=False, backend=backend, mode=mode)
    else:
        # Looking whether every weight is still the one that was compiled would take longer than a small model's layer.
        unguarded = getattr(torch.compiler, "skip_all_guards_unsafe", None)
        options = None if unguarded is None else {"guard_filter_fn": unguarded}
        fast = torch.compile(_with_own_code(function), fullgraph=True, backend=backend, options=options)
    num_calls = 0

    def first_call(inputs: tuple[Any, ...]) -> Any:
        """Compile and call: a minute, or seconds with a warm cache."""
        for number, dimension, most in dynamic or ():
            torch._dynamo.mark_dynamic(inputs[number], dimension, min=2, max=most)
        with progress_bar(1, f"compile {what}", "graph", shown=backend == BACKEND) as progress:
            results = fast(*inputs)
            progress.update()
        return results

    def call(*inputs: Any) -> Any:
        nonlocal num_calls
        if on_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            results = fast(*inputs) if num_calls else first_call(inputs)
        except torch.OutOfMemoryError:
            raise
        # Dynamo's and inductor's errors come at any call of a new shape. Triton's launcher, a missing C compiler and
        # CUDA while it records a graph raise RuntimeError, in one of the first calls.
        except (TorchDynamoException, RuntimeError) as error:
            if not isinstance(error, TorchDynamoException) and not (on_cuda and num_calls < FIRST_CALLS):
                raise
            raise UserError(
                f"{what} cannot be compiled on this machine ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}): use eval.compile=false"
            ) from error
        num_calls += 1
        return results

    return call
