"""The kernels of `cuda_attention` on a ghost of a GPU: counted launches, with the results of torch's attention.

Their own bodies do not run, but a launch has to fit their signatures.
"""

import dis
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
from support.ghost_device import GhostDevice
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.models.kernels import cuda_attention


class _Kernel:
    """A Triton kernel; `kernel[grid](...)` launches it.

    Args:
        signature: What Triton is given.
        run: What runs instead, on the same arguments by name.
    """

    def __init__(self, signature: inspect.Signature, run: Callable[..., None]) -> None:
        self._signature, self._run = signature, run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            GhostDevice.note("launch", self._run.__name__)
            self._run(**self._signature.bind(*arguments, **constants).arguments)

        return launch


def kernel_signatures() -> list[inspect.Signature]:
    """Return the signatures of the kernels; Triton is not needed.

    Raises:
        NameError: A kernel reads a name that is neither a parameter nor its own, or there is no parameter of a name
            that is not to be specialised.
    """
    signatures = []

    def jit(do_not_specialize: list[str]) -> Callable[[FunctionType], FunctionType]:
        def add(kernel: FunctionType) -> FunctionType:
            signature = inspect.signature(kernel)
            read = {each.argval for each in dis.get_instructions(kernel) if each.opname == "LOAD_GLOBAL"}
            if unknown := read - {"range"} | {*do_not_specialize} - {*signature.parameters}:
                raise NameError(f"{kernel.__name__} has no parameter {', '.join(sorted(unknown))}")
            signatures.append(signature)
            return kernel

        return add

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit, triton.language = jit, language  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
        cuda_attention._kernels.__wrapped__()
    return signatures


def split_kernels() -> tuple[_Kernel, _Kernel]:
    """In place of `cuda_attention._kernels`, which Triton compiles."""
    results: list[torch.Tensor] = []

    def partial_attention(q_ptr: Any, k_ptr: Any, v_ptr: Any, mask_ptr: Any, scale: float, **given: Any) -> None:
        mask = mask_ptr.held if given["HAS_MASK"] else None
        out = scaled_dot_product_attention(q_ptr.held, k_ptr.held, v_ptr.held, mask, scale=scale, enable_gqa=True)
        results.append(out.transpose(1, 2))

    def merge_splits(result_ptr: Any, **_: Any) -> None:
        result_ptr.held.copy_(results.pop())

    partial, merge = kernel_signatures()
    return _Kernel(partial, partial_attention), _Kernel(merge, merge_splits)
