"""How fast this machine reads as many bytes as a step of the target must: what a good baseline comes near to.

Few rows through a model are a matter of reading its weights. The read is timed between questions, so that it is of the
same minute as the baseline's steps; small weights stay in caches for both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.cpu_kernels import has_kernels

READS = 3  # the first also waits for what a device still has to do
BUFFER_BYTES = 2**28  # read again and again; more than GPUs keep in caches


class WeightReading:
    """A read of as many bytes as a step of one row reads.

    bytes: of all parameters, each memory once. Embeddings are left out, of which a step reads single rows, unless the
    output head is the same memory. The KV cache is not counted. None for a mixture of experts, whose steps read what
    its router chooses.

    On a CPU the weights themselves are read, by our kernel. Elsewhere, and without a compiler, a buffer is summed: a
    sum for each weight would tell how fast kernels start.
    """

    def __init__(self, target: Any) -> None:
        self._device: torch.device = target.device
        self._weights = weights_of_a_step(target)
        experts = any("experts" in name for name, _ in target.named_parameters())
        self.bytes = None if experts else sum(weight.nbytes for weight in self._weights)

    def seconds(self) -> float | None:
        """The median seconds of a few reads of all of them; None where `bytes` is."""
        if self.bytes is None:
            return None
        if self._device.type == "cpu" and has_kernels():
            return _median_s(self._read_weights)
        words = max(1, self.bytes // torch.int64.itemsize)
        buffer = torch.ones(min(words, BUFFER_BYTES // torch.int64.itemsize), dtype=torch.int64, device=self._device)
        return _median_s(lambda: _read_buffer(buffer, words))

    def _read_weights(self) -> None:
        for weight in self._weights:
            torch.ops.draftsmith.read(weight)


def weights_of_a_step(target: nn.Module) -> list[Tensor]:
    """All parameters but those of embeddings; what modules share is there once."""
    weights: dict[int, Tensor] = {}
    for module in target.modules():
        if not isinstance(module, nn.Embedding):
            for weight in module.parameters(recurse=False):
                weights.setdefault(weight.data_ptr(), weight.detach().contiguous())
    return list(weights.values())


def _read_buffer(buffer: Tensor, words: int) -> int:
    """Sum as many words, which also waits for the device."""
    total = buffer.sum()
    for begin in range(len(buffer), words, len(buffer)):
        total += buffer[: words - begin].sum()
    return int(total)


def _median_s(read: Callable[[], object]) -> float:
    taken = []
    for _ in range(READS):
        started = time.perf_counter()
        read()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
