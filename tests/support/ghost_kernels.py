"""The kernels of `cuda_attention` on a ghost of a GPU: counted launches, with the results of torch's attention."""

from collections.abc import Callable
from typing import Any

import torch
from support.ghost_device import GhostDevice
from torch.nn.functional import scaled_dot_product_attention


class _Kernel:
    """A Triton kernel; `kernel[grid](...)` launches it."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            GhostDevice.note("launch", self._run.__name__)
            self._run(*arguments, **constants)

        return launch


def split_kernels() -> tuple[_Kernel, _Kernel]:
    """In place of `cuda_attention._kernels`, which Triton compiles."""
    results: list[torch.Tensor] = []

    def partial_attention(q: Any, k: Any, v: Any, mask: Any, *rest: Any, HAS_MASK: bool, **_: Any) -> None:
        held = mask.held if HAS_MASK else None
        scale = rest[8]
        out = scaled_dot_product_attention(q.held, k.held, v.held, held, scale=scale, enable_gqa=True)
        results.append(out.transpose(1, 2))

    def merge_splits(parts: Any, result: Any, *_: Any, **__: Any) -> None:
        result.held.copy_(results.pop())

    return _Kernel(partial_attention), _Kernel(merge_splits)
