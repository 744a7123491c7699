"""As many batches for every process, no row dropped and none doubled.

accelerate fills the last batches of an epoch with rows from its beginning. Here they stay as short as they are, and a
process for which there is none gets an empty batch, which `collate_right_padded` turns into padding.
"""

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader


class EvenBatches(BatchSampler):
    """The batches of all processes together, and empty ones behind them up to a multiple of their number."""

    batch_size: Any = None  # batches differ in size

    def __init__(self, batches: BatchSampler, num_processes: int) -> None:
        self._batches, self._num_processes = batches, num_processes
        self.drop_last = batches.drop_last

    @property
    def sampler(self) -> Any:
        """Of the rows: accelerate tells it the epoch."""
        return self._batches.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self._batches.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        num_batches = 0
        for batch in self._batches:
            num_batches += 1
            yield batch
        yield from ([] for _ in range(-num_batches % self._num_processes))

    def __len__(self) -> int:
        return -(-len(self._batches) // self._num_processes) * self._num_processes


def even_out(loader: DataLoader) -> DataLoader:
    """The same loader, as accelerate prepared it, with batches as above; one process needs none of it."""
    shard = getattr(loader, "batch_sampler", None)
    if isinstance(shard, BatchSamplerShard) and shard.num_processes > 1:
        shard.batch_sampler = EvenBatches(shard.batch_sampler, shard.num_processes)
        shard.batch_size, shard.even_batches = None, False
    return loader
