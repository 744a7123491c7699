"""`torch.compile` as decoding on CUDA uses it: no graph breaks, and a CUDA graph for every number of rows.

Compiled code is cached in `$DRAFTSMITH_CACHE`, so that a second process loads it in seconds.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from draftsmith.errors import UserError
from draftsmith.files import cache_root
from draftsmith.models.kernels.cpu_library import cpp_compiler
from draftsmith.progress import progress_bar

BACKEND = "inductor"
MOST_SHAPES = 64  # of one function, in one process
FIRST_CALLS = 3  # on CUDA: warm up, record a graph, replay it
SWITCH = "DRAFTSMITH_COMPILE"  # 0: nothing is compiled unless a recipe asks for it

logger = logging.getLogger(__name__)


def compiles_by_default(device: torch.device) -> bool:
    """Return True if decoding on this device is compiled by default, which saves the calls of small operations.

    That is so with a C++ compiler, which Triton and the CPU kernels need, unless `$DRAFTSMITH_COMPILE` is 0. On a CPU
    the value is only recorded with a measurement: its kernels need no `torch.compile`.
    """
    return device.type in ("cpu", "cuda") and os.environ.get(SWITCH) != "0" and cpp_compiler() is not None


def padded_rows(rows: int) -> int:
    """Round a number of rows up to a power of two, so that few shapes are compiled."""
    return 1 << (rows - 1).bit_length()


class Graphs:
    """A function of tensors, compiled once for every number of rows; each is recorded as a CUDA graph.

    A call copies its arguments into separate input memory. The next call overwrites the memory of the results: copy
    those that are kept longer. The function must return the same results if it is called twice.

    A graph is recorded here and not by torch's mode "reduce-overhead", which looks at the guards of every layer before
    it replays (0.16 ms for 30 layers), and copies every input: `CUDAGraph.replay` is one launch. Where recording fails,
    the compiled function runs without a graph.

    Args:
        function: Takes tensors on the device; the first dimension of each is the rows.
        what: Name of the function in messages.
        must: Raise an error if the function cannot be compiled. By default warn, and run it uncompiled.
        group: List of `Graphs` that this one joins: if one of them cannot be compiled, all run uncompiled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        what: str,
        device: torch.device,
        backend: str = BACKEND,
        must: bool = False,
        group: list[Graphs] | None = None,
    ) -> None:
        self._function, self._what, self._device, self._backend, self._must = function, what, device, backend, must
        self._inputs: dict[int, list[Tensor]] = {}
        self._calls: dict[int, Callable[[], Any]] = {}
        self._num_calls: Counter[int] = Counter()
        self.works = True
        self._group = [] if group is None else group
        self._group.append(self)

    def __call__(self, rows: int, *inputs: Tensor | Sequence[Tensor]) -> Any:
        """Return the function's results for `rows` rows.

        Args:
            inputs: Tensors on the device or from `for_device`; a list of tensors is concatenated along the rows. Rows
                that are missing up to `rows` keep the values of earlier calls.

        Raises:
            UserError: The function cannot be compiled, and `must` is set.
        """
        parts = [[each] if isinstance(each, Tensor) else each for each in inputs]
        if rows not in self._inputs:
            self._inputs[rows] = [
                torch.zeros(rows, *part.shape[1:], dtype=part.dtype, device=self._device) for part, *_ in parts
            ]
        for held, given in zip(self._inputs[rows], parts, strict=True):
            first = 0
            for part in given:
                held[first : first + len(part)].copy_(part, non_blocking=True)
                first += len(part)
        if self.works:
            try:
                return self._run(rows)
            except UserError as error:
                if self._must:
                    raise
                logger.warning("%s; running without compilation", str(error).partition(": use eval.compile")[0])
                for graphs in self._group:
                    graphs.works = False
        return self._function(*self._inputs[rows])

    def _run(self, rows: int) -> Any:
        try:
            results = self._calls[rows]() if rows in self._calls else self._first_results(rows)
        except (UserError, torch.OutOfMemoryError):
            raise
        # Dynamo's and inductor's errors; on CUDA also those of Triton, a missing C compiler and a replay, of many
        # types, in one of the first calls.
        except Exception as error:
            is_first = self._device.type == "cuda" and self._num_calls[rows] < FIRST_CALLS
            if not isinstance(error, TorchDynamoException) and not is_first:
                raise
            raise _cannot_compile(self._what, error) from error
        self._num_calls[rows] += 1
        return results

    def _first_results(self, rows: int) -> Any:
        """Compile, and on CUDA record a graph; return the results of the first call."""
        inputs, fast = self._inputs[rows], _compile(self._function, self._backend, dynamic=False)
        results = _first_call(lambda: fast(*inputs), self._what, self._backend)
        self._calls[rows] = lambda: fast(*inputs)
        if self._device.type != "cuda":
            return results
        try:
            replay, recorded = record_graph(self._calls[rows], self._device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of many types too
            logger.warning(
                "%s cannot be recorded as a CUDA graph (%s); running without one", self._what, _in_short(error)
            )
            return self._calls[rows]()

        def replayed() -> Any:
            replay()
            return recorded

        self._calls[rows] = replayed
        return replayed()


def record_graph(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Record a CUDA graph of a call; return a function that replays it, and the results, which a replay overwrites."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # cuBLAS and Triton prepare themselves in the first calls of a stream
            call()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, of a server, may allocate meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = call()
    return graph.replay, results


def _compile(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    """Compile a copy of a function: compiled code is stored with its code, which several closures share."""
    assert isinstance(function, FunctionType)
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_SHAPES)  # beyond it torch silently runs uncompiled
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "inductor"))
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    fast: Callable[..., Any] = torch.compile(own, fullgraph=True, backend=backend, **options)
    return fast


def _first_call(call: Callable[[], Any], what: str, backend: str) -> Any:
    """Compile and call: a minute, or seconds with a warm cache."""
    with progress_bar(1, f"compile {what}", "graph", shown=backend == BACKEND) as progress:
        results = call()
        progress.update()
    return results


def _cannot_compile(what: str, error: Exception) -> UserError:
    return UserError(f"{what} cannot be compiled on this machine ({_in_short(error)}): use eval.compile=false")


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
