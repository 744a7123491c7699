"""Run models on tensors without values, and count what they would allocate and compute.

Weights and activations are torch's `FakeTensor`s: a shape, a dtype and a storage of known size, no memory, so that an
8B model costs nothing. What decides shapes is small (token ids, masks, indices) and stays real, so that `nonzero` and
boolean indexing give what they would give. Where a value is asked for that does not exist, the answer is the one that
costs most: an unknown number is 1, an unknown condition is true everywhere. The model's own code is what is counted.

FLOPs are those of matrix products and attention, 2 for a multiplication and its addition; causal attention counts half.
Not seen: what a kernel allocates and frees inside itself, the device's context, fragmentation.
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
    """What one part of a step needs; bytes by kind of tensor, FLOPs of the `head` and of the `layers`."""

    peak_bytes: int = 0
    at_peak_bytes: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)


class FakeRun(TorchDispatchMode):
    """A mode in which tensors are counted, not computed.

    `logits_widths` are sizes of vocabularies: a tensor whose last dimension is one of them counts as `logits`. FLOPs of
    products with one of the `heads`' weights, or with rows or a cast of it, count as the `head`'s.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Phase] = {}
        self.logits_widths: set[int] = set()
        self.heads: set[int] = set()  # storages by address, as below
        self._live: dict[int, tuple[str, int, Any]] = {}  # kind, bytes, and the reference that tells when it dies
        self._live_bytes: Counter[str] = Counter()
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._phase = Phase()
        self._twins: dict[int, tuple[Any, Any]] = {}  # of weights, so that tied ones stay tied
        self._is_building = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """Make models in this context: their weights have no values. Then `adopt` them."""
        self._is_building = True
        try:
            with torch.device("meta"), self:
                yield
        finally:
            self._is_building = False

    def adopt(self, kind: str, model: nn.Module) -> None:
        """Make the weights of a model from `building` fake ones on the CPU, counted under this kind."""
        modules = [model]
        for module in modules:  # which grows meanwhile
            if id(module) in self._twins:
                continue
            self._twins[id(module)] = module, module
            places: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
            for place in places:
                place.update({name: self._twin(value) for name, value in place.items() if isinstance(value, Tensor)})
            # Plain objects and bound methods hold what torch shall not take for a part of the model.
            held = [value for plain in vars(module).values() for value in getattr(plain, "__dict__", {}).values()]
            held += [getattr(value, "__self__", None) for value in vars(module).values()]
            modules += [value for value in (*module._modules.values(), *held) if isinstance(value, nn.Module)]
        self.count_as(kind, [*model.parameters(), *model.buffers()])

    def _faked(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with self._fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def _twin(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._twins:
            fake = self._faked(tensor)
            fake = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
            self._twins[id(tensor)] = tensor, fake  # both: an id is one tensor's only while that lives
        return self._twins[id(tensor)][1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens in this context under this name."""
        outer, self._phase = self._phase, self.phases.setdefault(name, Phase())
        self._note_peak()
        try:
            with self:
                yield
        finally:
            self._phase = outer

    def count_as(self, kind: str, tensors: Any) -> None:
        """Let the storages of these tensors be of this kind from now on."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._track(tensor, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func._overloadpacket
        if func.namespace == "prim":  # asks for a tensor's device or layout
            return func(*args, **kwargs)
        if self._is_building:
            return _ANSWERS.get(packet, func)(*args, **kwargs)
        flops_of = _CPU_ATTENTION.get(packet) or flop_registry.get(packet)
        # What has a kernel of its own needs none of the memory that its definition in smaller operators would.
        if flops_of is None and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU"):
            with self:
                composed = func.decompose(*args, **kwargs)
            if composed is not NotImplemented:
                return composed
        fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        out = (self._run_fake if fake else self._run_real)(func, args, kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._track(leaf)
        if packet in _COPIES and _storage(args[0]) in self.heads:
            self.heads.add(out.untyped_storage()._cdata)
        if flops_of is not None:
            part = "head" if any(_storage(each) in self.heads for each in args) else "layers"
            self._phase.flops[part] += flops_of(*args, **kwargs, out_val=out)
        return out

    def _run_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute, unless that would be much work."""
        if not (_VALUE_TAGS.intersection(func.tags) or func.is_view or func._schema.is_mutable):
            probe = self._run_fake(func, args, kwargs)
            if sum(leaf.numel() for leaf in tree_leaves(probe) if isinstance(leaf, Tensor)) > LARGEST_REAL_ELEMENTS:
                return probe
        out = func(*args, **kwargs)
        # Values that a fake source would have filled are zeros.
        return out.zero_() if func._overloadpacket in _UNINITIALIZED else out

    def _run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        packet = func._overloadpacket
        if packet in _ANSWERS:
            return _ANSWERS[packet](*args, **kwargs)
        if packet in _INDEXED:
            args = (args[0], _as_integer_indices(args[1]), *args[2:])
        faked = tree_map_only(Tensor, self._faked, (args, kwargs))
        with self._fake_mode:
            out = func(*faked[0], **faked[1])
        # A real tensor that was to be written to keeps its values: what would be written does not exist.
        return args[0] if func._schema.is_mutable and isinstance(out, Tensor) else out

    def _track(self, tensor: Tensor, kind: str | None = None) -> None:
        """Count a storage until it dies: a new one, or one whose kind changes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live and kind is None:
            return
        if key in self._live:
            self._live_bytes[self._live[key][0]] -= self._live[key][1]
        kind = kind or ("logits" if tensor.ndim and tensor.shape[-1] in self.logits_widths else "activations")
        # torch keeps a storage's Python object for as long as the storage: the reference dies with the memory.
        self._live[key] = kind, storage.nbytes(), weakref.ref(storage, lambda _: self._died(key))
        self._live_bytes[kind] += storage.nbytes()
        self._note_peak()

    def _died(self, key: int) -> None:
        kind, size_bytes, _ = self._live.pop(key)
        self._live_bytes[kind] -= size_bytes
        self.heads.discard(key)

    def _note_peak(self) -> None:
        if self._live_bytes.total() > self._phase.peak_bytes:
            self._phase.peak_bytes, self._phase.at_peak_bytes = self._live_bytes.total(), self._live_bytes.copy()


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _as_integer_indices(indices: Any) -> list[Tensor | None]:
    """Boolean index tensors as the integers that they stand for."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            known = not isinstance(index, FakeTensor)
            found.extend((index if known else torch.ones(index.shape, dtype=torch.bool)).nonzero().unbind(1))
        else:
            found.append(index)
    return found


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, num_products: int) -> int:
    """Products [.., Sq, Sk] x Dh; a causal kernel skips the blocks above the diagonal."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    flops = num_products * pairs * (query.shape[-1] + value.shape[-1])
    return flops // 2 if is_causal else flops


# FLOPs of kernels that torch's own table lacks. The backward computes the scores again, and the gradients of scores,
# queries, keys and values: 5 products for the forward's 2.
_CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, dropout_p=0.0, is_causal=False, **_: _attention_flops(q, k, v, is_causal, 2)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, out, lse, dropout_p, is_causal, **_: _attention_flops(q, k, v, is_causal, 5)
    ),
}
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# What operators answer whose result depends on values, when there are none.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense: lambda t: True if t.dtype == torch.bool else 1.0 if t.is_floating_point() else 1,
    aten.equal: lambda *_: True,
    aten.nonzero: lambda condition: torch.ones(condition.shape, dtype=torch.bool).nonzero(),
    aten.bincount: lambda _, weights=None, minlength=0: torch.ones(max(minlength, 1), dtype=torch.int64),
}
_INDEXED = (aten.index, aten.index_put, aten.index_put_)
_COPIES = (aten._to_copy, aten.index)
_UNINITIALIZED = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)
