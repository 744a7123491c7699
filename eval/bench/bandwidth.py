"""Speed of a plain read of as many bytes as one step of the target reads: an upper bound for the baseline.

A forward of few tokens is bound by reading the weights. The read is timed between questions, so that it runs under the
same load as the baseline's steps; small weights stay in caches for both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.kernels.cpu_kernels import PackedLinear

READS = 3  # the first also waits for the device's pending work
BUFFER_BYTES = 2**28  # read repeatedly; larger than GPUs' caches


class WeightReading:
    """A timed read of as many bytes as a step of one token reads.

    bytes: size of all parameters, shared memory counted once. Embeddings are left out, as a step reads single rows of
    them, unless the output head shares their memory. The KV cache is not counted. None for a mixture of experts, whose
    steps read only the experts that the router chooses.

    On a CPU the weights themselves are summed: the packed copies, which a step reads too. On a GPU one buffer is summed
    repeatedly, since one sum per weight would measure kernel launches.
    """

    def __init__(self, target: Any) -> None:
        self._device: torch.device = target.device
        self._linears = [module for module in target.modules() if isinstance(module, PackedLinear)]
        weights: dict[int, Tensor] = {}  # shared ones once
        for module in target.modules():
            if not isinstance(module, nn.Embedding):
                for weight in module.parameters(recurse=False):
                    weights.setdefault(weight.data_ptr(), weight.detach().contiguous())
        self._weights = list(weights.values())
        experts = any("experts" in name for name, _ in target.named_parameters())
        self.bytes = None if experts else sum(weight.nbytes for weight in self._weights)

    def seconds(self) -> float | None:
        """Return the median time, in seconds, of a few reads of `bytes` bytes; None if `bytes` is None."""
        if self.bytes is None:
            return None
        if self._device.type == "cpu":
            packed = {linear.weight.data_ptr(): linear.packed for linear in self._linears if linear.packed is not None}
            read = [packed.get(weight.data_ptr(), weight) for weight in self._weights]
            # Sums of whole words are as fast as the memory, those of bf16 are not.
            words = [each.flatten().view(torch.int64) if each.nbytes % 8 == 0 else each for each in read]
            return _median_s(lambda: [each.sum() for each in words])
        count = max(1, self.bytes // torch.int64.itemsize)
        buffer = torch.ones(min(count, BUFFER_BYTES // torch.int64.itemsize), dtype=torch.int64, device=self._device)
        return _median_s(lambda: _read_buffer(buffer, count))


def _read_buffer(buffer: Tensor, words: int) -> int:
    """Sum `words` int64 words by reading the buffer repeatedly; waits for the device."""
    total = buffer.sum()
    for begin in range(len(buffer), words, len(buffer)):
        total += buffer[: words - begin].sum()
    return int(total)


def _median_s(read: Callable[[], object]) -> float:
    times_s = []
    for _ in range(READS):
        started = time.perf_counter()
        read()
        times_s.append(time.perf_counter() - started)
    return statistics.median(times_s)
