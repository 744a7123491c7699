"""Between host and device: lists of numbers, one copy each, through pinned memory where there is a device.

A copy from ordinary memory waits for all that the device has to do; one from pinned memory joins the queue.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Nested lists of equal lengths as a tensor; on a device the host does not wait for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=4096)
def index_on(places: tuple[int, ...], device: torch.device) -> Tensor:
    """[n] int64 on the device, of places that recur: copied once."""
    return to_device(places, device)


def to_host(tensor: Tensor) -> Any:
    """Nested lists; the host waits for the device once."""
    if tensor.device.type != "cuda":
        return tensor.tolist()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return pinned.tolist()
