"""Run models on tensors without values, and count what they would allocate and compute.

`FakeRun` is a dispatch mode over torch's `FakeTensorMode`: weights and activations are fake (a shape, a dtype and a
storage of known size, no memory), so an 8B model costs nothing, and every storage's birth and death is seen. What
decides *shapes* is small: token ids, masks, indices. Those tensors stay real, so that `nonzero` and boolean indexing
give what they would give. The model's own code is what is counted, so there is no formula that could go stale.

Where a value is asked for that does not exist, the answer is the one that costs most: an unknown number is 1, an
unknown condition is true everywhere.

FLOPs are those of matrix products and attention, 2 for a multiplication and its addition; causal attention counts half.
Not seen: what a kernel allocates and frees inside itself, the device's own context, fragmentation.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# Tensors up to this size are computed for real when nothing fake goes into them.
LARGEST_REAL_ELEMENTS = 1 << 22


@dataclass
class Phase:
    """What one part of the run needed."""

    peak_bytes: int = 0
    at_peak_bytes: Counter[str] = field(default_factory=Counter)  # by kind of tensor
    flops: Counter[str] = field(default_factory=Counter)  # of `head` and `layers`


class FakeRun(TorchDispatchMode):
    """A mode in which tensors are counted, not computed.

    Args:
        logits_widths: Sizes of vocabularies: a tensor whose last dimension is one of them counts as `logits`.
    """

    def __init__(self, logits_widths: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.phases: dict[str, Phase] = {}
        self.logits_widths = logits_widths
        self.live_bytes: Counter[str] = Counter()
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._entries: dict[int, _Entry] = {}  # by the storage's address
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # tied weights stay tied
        self._phase = Phase()
        self._building = False

    # ---- what a caller says about the run ----

    @contextmanager
    def building(self) -> Iterator[None]:
        """Make models in here: their weights have no values. Then `adopt` them."""
        self._building = True
        try:
            with torch.device("meta"), self:
                yield
        finally:
            self._building = False

    def adopt(self, model: nn.Module, kind: str) -> None:
        """Make the weights of a model from `building` fake ones on the CPU, counted under this kind."""
        waiting, seen = [model], set()
        while waiting:
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            places: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
            for place in places:
                place.update({name: self._adopted(value) for name, value in place.items() if isinstance(value, Tensor)})
            # Plain objects hold what torch shall not take for a part of the model.
            held = [value for plain in vars(module).values() for value in getattr(plain, "__dict__", {}).values()]
            waiting += [value for value in (*module._modules.values(), *held) if isinstance(value, nn.Module)]
        self.count_as(kind, [*model.parameters(), *model.buffers()])

    def _adopted(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._twins:
            fake = self._fake_like(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._twins[id(tensor)] = (tensor, fake)  # both: an id is one tensor's only while that lives
        return self._twins[id(tensor)][1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens in here under this name; peaks of a repeated phase are the highest."""
        outer, self._phase = self._phase, self.phases.setdefault(name, Phase())
        self._note_peak()
        try:
            with self:
                yield
        finally:
            self._phase = outer

    def count_as(self, kind: str, tensors: Any) -> None:
        """From now on the storages of these tensors are of this kind."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._track(tensor, kind)

    def count_products_as_head(self, weight: Tensor) -> None:
        """FLOPs of products with this weight, or rows or a cast of it, are counted under `head`."""
        self._entries[weight.untyped_storage()._cdata].is_head = True

    # ---- the dispatch ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a tensor's device or layout
            return func(*args, **kwargs)
        if self._building:
            return _ANSWERS.get(func._overloadpacket, func)(*args, **kwargs)
        counted = func._overloadpacket in flop_registry or func._overloadpacket in _FLOPS
        # What has a kernel of its own needs none of the memory that its definition in smaller operators would.
        if not counted and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU"):
            with self:
                composed = func.decompose(*args, **kwargs)
            if composed is not NotImplemented:
                return composed
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            out = self._run_fake(func, args, kwargs)
        else:
            out = self._run_real(func, args, kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._track(leaf)
        if func._overloadpacket in _COPIES and self._is_head(args[0]):
            self.count_products_as_head(out)
        self._count_flops(func, args, kwargs, out)
        return out

    def _run_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute, unless that would be much work."""
        depends_on_values = not _VALUE_TAGS.isdisjoint(func.tags)
        if not (depends_on_values or func.is_view or func._schema.is_mutable):
            probe = self._run_fake(func, args, kwargs)
            if sum(leaf.numel() for leaf in tree_leaves(probe) if isinstance(leaf, Tensor)) > LARGEST_REAL_ELEMENTS:
                return probe
        out = func(*args, **kwargs)
        if func._overloadpacket in _UNINITIALIZED:
            out.zero_()  # values that a fake source would have filled are zeros
        return out

    def _run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        packet = func._overloadpacket
        if packet in _ANSWERS:
            return _ANSWERS[packet](*args, **kwargs)
        if packet in _INDEXED:
            args = (args[0], _as_integer_indices(args[1]), *args[2:])
        originals: dict[int, Tensor] = {}

        def faked(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            fake = self._fake_like(tensor)
            originals[id(fake)] = tensor
            return fake

        fake_args, fake_kwargs = tree_map_only(Tensor, faked, (args, kwargs))
        with self._fake_mode:
            out = func(*fake_args, **fake_kwargs)
        # A real tensor that was to be written to keeps its values: what would be written does not exist.
        return tree_map_only(Tensor, lambda tensor: originals.get(id(tensor), tensor), out)

    def _fake_like(self, tensor: Tensor) -> Tensor:
        with self._fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    # ---- the books ----

    def _track(self, tensor: Tensor, kind: str | None = None) -> None:
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            if kind is not None:
                self.live_bytes[entry.kind] -= entry.size_bytes
                self.live_bytes[kind] += entry.size_bytes
                entry.kind = kind
            return
        if kind is None:
            kind = "logits" if tensor.ndim and tensor.shape[-1] in self.logits_widths else "activations"
        # torch keeps a storage's Python object for as long as the storage: the reference dies with the memory.
        key = storage._cdata
        self._entries[key] = _Entry(kind, storage.nbytes(), weakref.ref(storage, lambda _: self._died(key)))
        self.live_bytes[kind] += storage.nbytes()
        self._note_peak()

    def _died(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.live_bytes[entry.kind] -= entry.size_bytes

    def _note_peak(self) -> None:
        total_bytes = self.live_bytes.total()
        if total_bytes > self._phase.peak_bytes:
            self._phase.peak_bytes = total_bytes
            self._phase.at_peak_bytes = self.live_bytes.copy()

    def _count_flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = func._overloadpacket
        if packet in _FLOPS:
            flops = _FLOPS[packet](*args, **kwargs)
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
        else:
            return
        self._phase.flops["head" if any(map(self._is_head, args)) else "layers"] += flops

    def _is_head(self, value: Any) -> bool:
        entry = self._entries.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None
        return entry is not None and entry.is_head


@dataclass
class _Entry:
    """A storage that is alive."""

    kind: str
    size_bytes: int
    reference: Any
    is_head: bool = False


def _as_integer_indices(indices: Any) -> list[Tensor | None]:
    """Boolean index tensors as the integers that they stand for."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found.extend((_all_true(index) if isinstance(index, FakeTensor) else index).nonzero().unbind(1))
        else:
            found.append(index)
    return found


def _all_true(condition: Tensor) -> Tensor:
    return torch.ones(condition.shape, dtype=torch.bool)


def _answer_item(tensor: Tensor) -> Any:
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _answer_nonzero(tensor: Tensor) -> Tensor:
    return _all_true(tensor).nonzero()


def _answer_bincount(_values: Tensor, _weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return torch.ones(max(minlength, 1), dtype=torch.int64)


_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# What operators answer whose result depends on values, when there are none.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense: _answer_item,
    aten.equal: lambda *_: True,
    aten.nonzero: _answer_nonzero,
    aten.bincount: _answer_bincount,
}
_INDEXED = (aten.index, aten.index_put, aten.index_put_)
_COPIES = (aten._to_copy, aten.index)
_UNINITIALIZED = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, num_products: int) -> int:
    """Products [.., Sq, Sk] x Dh; a causal kernel skips the blocks above the diagonal."""
    heads = query.shape[:-2].numel()
    pairs = query.shape[-2] * key.shape[-2]
    flops = num_products * heads * pairs * (query.shape[-1] + value.shape[-1])
    return flops // 2 if is_causal else flops


def _cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> int:
    return _attention_flops(query, key, value, is_causal, 2)


def _cpu_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, dropout_p: float,
    is_causal: bool, **_: Any,
) -> int:  # fmt: skip
    # Scores again, and the gradients of scores, queries, keys and values: 5 products for the forward's 2.
    return _attention_flops(query, key, value, is_causal, 5)


# Kernels that torch's own table lacks.
_FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}
