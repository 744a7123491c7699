"""The memory held by tensors, counted after every operation, independent of the allocator."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):
    """Most elements, after any operation, of all storages created or seen within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_elements = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                elements = storage.nbytes() // tensor.element_size()
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), elements))
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.peak_elements = max(self.peak_elements, sum(elements for _, elements in self._live.values()))
        return result
