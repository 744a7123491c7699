"""Memory of keys and values while decoding, and the masks over it.

Shapes: R rows of a forward, S columns of the cache.
"""

from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 8  # elements


def aligned(columns: int) -> int:
    """The next multiple of the alignment."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def open_mask(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [..., R, S], which hide nothing, with rows that begin aligned."""
    return torch.zeros(*shape[:-1], aligned(shape[-1]), dtype=dtype, device=device)[..., : shape[-1]]


def to_device(values: Any, device: torch.device) -> Tensor:
    """A tensor, or nested lists of integers of equal lengths as an int64 tensor.

    A copy from ordinary memory waits for all that a GPU has to do; one from pinned memory joins the queue.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
