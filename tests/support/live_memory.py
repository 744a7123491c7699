"""What tensors hold in memory, seen operation by operation, whatever the allocator."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):
    """The most that storages which were made or seen inside held after any one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_elements = self.peak_bytes = 0
        self._live = dict[int, tuple[StorageWeakRef, int, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                size = storage.nbytes()
                self._live[storage._cdata] = (StorageWeakRef(storage), size, size // tensor.element_size())
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size, _ in self._live.values()))
        self.peak_elements = max(self.peak_elements, sum(elements for *_, elements in self._live.values()))
        return result
