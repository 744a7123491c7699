"""The memory held by tensors, counted after every operation, independent of the allocator."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):
    """Peak bytes after any operation of all storages created or seen within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_elements = self.peak_bytes = 0
        self._live = dict[int, tuple[StorageWeakRef, int, int]]()
        self._elements = self._bytes = 0  # of these storages, some of which may be freed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._live:
                    elements = size // tensor.element_size()
                    self._live[key] = (StorageWeakRef(storage), size, elements)
                    self._bytes, self._elements = self._bytes + size, self._elements + elements
        if self._bytes > self.peak_bytes or self._elements > self.peak_elements:
            self._count_again()
        return result

    def _count_again(self) -> None:
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self._bytes = sum(size for _, size, _ in self._live.values())
        self._elements = sum(elements for *_, elements in self._live.values())
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        self.peak_elements = max(self.peak_elements, self._elements)
