"""One training step of a recipe on tensors without values: what it allocates and computes, from configs alone.

`FakeRun` counts what runs in it. Weights and activations are torch's `FakeTensor`s: a shape, a dtype and a storage of
known size, no memory, so that an 8B model costs nothing. What decides shapes is small (token ids, masks, indices) and
stays real, so that `nonzero` and boolean indexing give what they would give. Where a value is asked for that does not
exist, the answer is the one that costs most: an unknown number is 1, an unknown condition is true everywhere.

`FakeTraining` makes the calls of `DrafterTrainer` in it, in their order: the model's own code is what is counted, for
every kind of drafter. FLOPs are those of matrix products and attention, 2 for a multiplication and its addition; causal
attention counts half. Not seen: what a kernel allocates and frees inside itself, the device's context, fragmentation.

Shapes: B batch, S sequence.
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
from transformers import Trainer, TrainingArguments

from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.head_loss import chunks_made_for
from draftsmith.models.target.features import drop_decoder_layers
from draftsmith.models.target.loading import target_device, target_without_weights
from draftsmith.models.target.quantized import saved_bytes
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.training_arguments import enable_gradient_checkpointing
from draftsmith.train.features.cache import refuse_obstacle

aten = torch.ops.aten
# Tensors up to this size are computed for real when nothing fake goes into them.
LARGEST_REAL_ELEMENTS = 1 << 22
LATE_STEP = 1 << 40  # a drafter that warms up is planned as it is afterwards


@dataclass
class Phase:
    """What one part of a step needs; bytes by kind of tensor, FLOPs of the `head` and of the `layers`."""

    peak_bytes: int = 0
    at_peak_bytes: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)


@dataclass
class _Storage:
    """A storage that is alive, and the reference that tells when it dies."""

    kind: str
    size_bytes: int
    reference: Any
    is_head: bool = False


class FakeRun(TorchDispatchMode):
    """A mode in which tensors are counted, not computed.

    `logits_widths` are sizes of vocabularies: a tensor whose last dimension is one of them counts as `logits`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Phase] = {}
        self.logits_widths: set[int] = set()
        self.live_bytes: Counter[str] = Counter()
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages: dict[int, _Storage] = {}  # by address
        self._phase = Phase()
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # tied weights stay tied
        self._is_building = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """Make models in here: their weights have no values. Then `adopt` them."""
        self._is_building = True
        try:
            with torch.device("meta"), self:
                yield
        finally:
            self._is_building = False

    def adopt(self, kind: str, model: nn.Module) -> None:
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

    def _fake_like(self, tensor: Tensor) -> Tensor:
        with self._fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens in here under this name."""
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
                self._track(tensor)
                storage = self._storages[tensor.untyped_storage()._cdata]
                self.live_bytes[storage.kind] -= storage.size_bytes
                self.live_bytes[kind] += storage.size_bytes
                storage.kind = kind

    def count_products_as_head(self, weight: Tensor) -> None:
        """Count FLOPs of products with this weight, or rows or a cast of it, under `head`."""
        self._storages[weight.untyped_storage()._cdata].is_head = True

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
        if packet in _COPIES and self._is_head(args[0]):
            self.count_products_as_head(out)
        if flops_of is not None:
            part = "head" if any(map(self._is_head, args)) else "layers"
            self._phase.flops[part] += flops_of(*args, **kwargs, out_val=out)
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

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        kind = "logits" if tensor.ndim and tensor.shape[-1] in self.logits_widths else "activations"
        # torch keeps a storage's Python object for as long as the storage: the reference dies with the memory.
        self._storages[key] = _Storage(kind, size_bytes, weakref.ref(storage, lambda _: self._died(key)))
        self.live_bytes[kind] += size_bytes
        self._note_peak()

    def _died(self, key: int) -> None:
        storage = self._storages.pop(key)
        self.live_bytes[storage.kind] -= storage.size_bytes

    def _note_peak(self) -> None:
        total_bytes = self.live_bytes.total()
        if total_bytes > self._phase.peak_bytes:
            self._phase.peak_bytes = total_bytes
            self._phase.at_peak_bytes = self.live_bytes.copy()

    def _is_head(self, value: Any) -> bool:
        storage = self._storages.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None
        return storage is not None and storage.is_head


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


@dataclass(frozen=True)
class StepCost:
    """What one optimiser step of one process needs, by phase in their order, and its tokens without padding."""

    phases: dict[str, Phase]
    tokens: int

    @property
    def peak(self) -> tuple[str, Phase]:
        """The phase that needs most, and its needs."""
        return max(self.phases.items(), key=lambda item: item[1].peak_bytes)

    def flops(self) -> dict[str, int]:
        """FLOPs by part of the step."""
        total: Counter[str] = Counter()
        for name, phase in self.phases.items():
            total[name] += phase.flops["layers"]
            total["LM head"] += phase.flops["head"]
        return {name: flops for name, flops in total.items() if flops}


class FakeTraining:
    """A recipe's target and drafter without values, ready for steps.

    Args:
        recipe: Its target's config must be within reach, weights are not needed.
        args: Of the recipe's `train` section.

    Raises:
        UserError: As `load_target` and `Drafter.from_target`, or the optimiser cannot be had.
    """

    def __init__(self, recipe: Recipe, args: TrainingArguments) -> None:
        is_offline = recipe.data.features.source == "offline"
        if is_offline:
            refuse_obstacle(recipe)
        self._args, self._run = args, FakeRun()
        self._disk_dtype = getattr(torch, recipe.data.features.dtype) if is_offline else None
        self._device_type = target_device(recipe.target).type
        run = self._run
        with run.building():
            self.target = target_without_weights(recipe.target)
            self.drafter = load_drafter_class(recipe.drafter.kind).from_target(self.target, recipe.drafter.options)
        if is_offline:
            drop_decoder_layers(self.target)
        self._quantised_away_bytes = saved_bytes(recipe.target, self.target)
        for kind, model in (("target", self.target), ("drafter", self.drafter)):
            run.adopt(kind, model)
        sizes = (vars(model.config).items() for model in (self.target, self.drafter))
        run.logits_widths = {
            size for items in sizes for key, size in items if key.endswith("vocab_size") and isinstance(size, int)
        }
        for head in (self.target.get_output_embeddings(), self.drafter.borrowed_head):
            run.count_products_as_head(head.weight)
        self.drafter.train()
        self.drafter.training_step = LATE_STEP
        enable_gradient_checkpointing(args, self.drafter)
        self.trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(lambda p: run.count_as("gradients", p.grad))
        try:
            optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, self.drafter)
            self._optimizer = optimizer_class(self.trained, **options)
        except (ImportError, ValueError, TypeError) as error:
            raise UserError(f"key `train.optim`: {' '.join(str(error).split())}") from None
        with run:  # the state that its first step makes
            self._allocate_gradients()
            self._optimizer.step()
            run.count_as("optimiser", list(self._optimizer.state.values()))
            self._optimizer.zero_grad()

    def step(self, inputs: dict[str, Tensor]) -> StepCost:
        """Return the cost of a step on this batch: `input_ids`, `loss_mask`, ... [B, S], as collated."""
        run, args = self._run, self._args
        run.phases = {}
        ids, loss_mask, positions = inputs["input_ids"], inputs["loss_mask"], inputs.get("position_ids")
        run.count_as("features", inputs)
        with run.phase("target forward"):
            if args.gradient_accumulation_steps > 1:
                self._allocate_gradients()  # left by the batch before
            from_disk = None
            if self._disk_dtype is None:
                features = self.drafter.training_features(self.target, ids, positions)
            else:  # the Trainer fetches all batches of a step before it begins
                width = len(self.drafter.layers_read) * self.target.config.get_text_config().hidden_size
                from_disk = torch.zeros(args.gradient_accumulation_steps, *ids.shape, width, dtype=self._disk_dtype)
                run.count_as("features", from_disk)
                features = self.drafter.split_features(from_disk[0].to(self.target.dtype))
            run.count_as("features", features)
        half = torch.float16 if args.fp16 else torch.bfloat16
        autocast = torch.autocast("cpu", dtype=half, enabled=args.bf16 or args.fp16)
        with run.phase("drafter forward"), autocast, chunks_made_for(self._device_type):
            loss = self.drafter(ids, features[0], loss_mask, position_ids=positions, teacher_features=features[1]).loss
        with run.phase("backward"), chunks_made_for(self._device_type):
            loss.backward()
        del loss, features, from_disk
        with run.phase("optimiser step"):
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(self.trained, args.max_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
        for phase in run.phases.values():
            phase.at_peak_bytes["target"] -= self._quantised_away_bytes
            phase.peak_bytes -= self._quantised_away_bytes
        return StepCost(run.phases, int(inputs["attention_mask"].sum()))

    def _allocate_gradients(self) -> None:
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
            self._run.count_as("gradients", parameter.grad)
