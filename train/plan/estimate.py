"""Memory and FLOPs of one training step, in closed form from the shapes of target and drafter.

Both are built without weights. The rows that go through a layer follow from the batch's labels, as in training. Torch
counts the bytes that a layer saves for its backward, on a few rows of `FakeTensor`s (shapes without values), so that
layers of every kind are covered; the rest are sums. docs/results/machinery/plan_estimate.json compares the sums with
steps that were counted operation by operation.

Shapes: B batch, S sequence, G depths, N rows of the layers, D hidden, V' drafted tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel, Trainer

from draftsmith.errors import UserError
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.cpu_layers import head_size
from draftsmith.models.loss import BLOCK_ELEMENTS, LARGE_GRADIENT_BYTES, chunk_rows, loss_weights
from draftsmith.models.target.features import drop_decoder_layers, required_layers
from draftsmith.models.target.loading import target_device
from draftsmith.models.target.quantized import saved_bytes
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.optimizer import muon_parameters, muon_with_adamw
from draftsmith.train.drafter.training_arguments import DrafterTrainingArguments, enable_gradient_checkpointing
from draftsmith.train.features.cache import check_offline_support
from draftsmith.train.features.without_weights import models_without_weights

LATE_STEP = 1 << 40  # a drafter that warms up is planned as it is afterwards
MUON_ITERATIONS = 5  # Newton-Schulz, three products each


@dataclass(frozen=True)
class StepCost:
    """Bytes by part when most memory is in use, in the phase `peak`, and FLOPs by part of the step."""

    peak: str
    bytes: dict[str, int]
    flops: dict[str, float]
    tokens: int
    target: PreTrainedModel
    drafter: Drafter

    @property
    def peak_bytes(self) -> int:
        """Return the sum of all parts."""
        return sum(self.bytes.values())


def step_cost(recipe: Recipe, args: DrafterTrainingArguments, batch: dict[str, Tensor]) -> StepCost:
    """Estimate an optimizer step of one process on this batch: `input_ids`, `loss_mask`, ... [B, S], as collated.

    Raises:
        UserError: As `models_without_weights`, or the recipe's training cannot be done.
    """
    is_offline, accumulation = recipe.data.features.source == "offline", args.gradient_accumulation_steps
    if is_offline:
        check_offline_support(recipe)
    target, drafter = models_without_weights(recipe)
    drafter.train().training_step = LATE_STEP
    enable_gradient_checkpointing(args, drafter)
    if is_offline:
        drop_decoder_layers(target)
    step = _Step(args, batch, target, drafter, target_device(recipe.target).type)
    feature_bytes = step.num_tokens * len(required_layers(drafter)) * step.size * target.dtype.itemsize
    if is_offline:  # the Trainer fetches all batches of a step before the first
        disk_bytes = getattr(torch, recipe.data.features.dtype).itemsize
        feature_bytes += accumulation * feature_bytes * disk_bytes // target.dtype.itemsize
    drafter_ids = {id(parameter) for parameter in drafter.parameters()}  # a LoRA is part of both models
    target_tensors = [p for p in (*target.parameters(), *target.buffers()) if id(p) not in drafter_ids]
    activation_bytes, loss_bytes = step.saved()
    gradient_bytes = tensor_bytes(trained_parameters(drafter))
    rest = {
        "target": tensor_bytes(target_tensors) - saved_bytes(recipe.target, target),
        "drafter": tensor_bytes([*drafter.parameters(), *drafter.buffers()]),
        "gradients": gradient_bytes if accumulation > 1 else 0,  # of the micro-batch before
        "optimiser": _optimizer_bytes(args, drafter),
        "features": feature_bytes,
    }
    phases = {
        "backward": {**rest, "activations": activation_bytes, "loss": loss_bytes},
        "optimiser step": {**rest, "gradients": gradient_bytes, "features": 0, "activations": 0, "loss": 0},
    }
    peak = max(phases, key=lambda name: sum(phases[name].values()))
    flops = {name: amount for name, amount in step.flops(is_offline).items() if amount}
    return StepCost(peak, phases[peak], flops, int(batch["attention_mask"].sum()), target, drafter)


def trained_parameters(drafter: Drafter) -> list[nn.Parameter]:
    """Return the parameters that training changes."""
    return [parameter for parameter in drafter.parameters() if parameter.requires_grad]


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of these tensors, each counted once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def _optimizer_bytes(args: DrafterTrainingArguments, drafter: Drafter) -> int:
    """Return the bytes of the state that the optimizer's first step makes."""
    trained = trained_parameters(drafter)
    try:
        optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args, drafter)
        settings.pop("fused", None)  # the same state, but not on the meta device
        optimizer: torch.optim.Optimizer = optimizer_class(trained, **settings)
    except (ImportError, ValueError, TypeError) as error:
        raise UserError(f"key `train.optim`: {' '.join(str(error).split())}") from None
    if args.optimizer == "muon":
        optimizer = muon_with_adamw(optimizer, drafter, args.learning_rate)
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return tensor_bytes(v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v))


class _Step:
    """The rows of a training step and the modules that compute them.

    `layers` are decoder layers, all rows go through each; `heads`, where there are no layers, have a depth's rows each.
    """

    def __init__(
        self,
        args: DrafterTrainingArguments,
        batch: dict[str, Tensor],
        target: PreTrainedModel,
        drafter: Drafter,
        device_type: str,
    ) -> None:
        self._args, self._target, self._drafter, self._device_type = args, target, drafter, device_type
        self.size, self._depths = drafter.config.hidden_size, drafter.config.num_depths
        (_, self._length), self.num_tokens = batch["input_ids"].shape, batch["input_ids"].numel()
        self._groups = drafter.groups(batch["input_ids"], batch["loss_mask"], batch.get("position_ids"))
        self._labels, self._labelled_tokens = len(self._groups.labelled_m), int(batch["loss_mask"].sum())
        # The first depth of a grid may be a context, of which layers make keys and values alone.
        context = min(self._groups.first_depth, 1)
        batch_size, grid_depths, grid_length = self._groups.core_shape
        self._num_rows = sum(self._groups.counts_r[context:])
        self._num_queries = batch_size * (grid_depths - context) * grid_length
        self._num_keys = batch_size * grid_depths * grid_length
        self._layers = list(getattr(drafter, "layers", []))
        own_heads = {id(head) for head in drafter.vocab.own_heads}
        lists = [c for c in drafter.children() if isinstance(c, nn.ModuleList) and len(c) == self._depths]
        self._heads = [head for heads in lists for head in heads if id(head) not in own_heads and not self._layers]
        self._trains_target = getattr(drafter, "trains_target", False)
        self._half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._mode, self._core = FakeTensorMode(allow_non_fake_inputs=True), _AttentionCore()
        # Losses to the teacher count by its mass of a reduced vocabulary.
        self._weighs_teacher = drafter.needs_teacher and drafter.vocab.ids is not None and drafter.config.teacher_mass
        # Depths that follow one another, each on the outputs of the one before, as no masks stand for them.
        self._stepwise = bool(self._layers) and self._depths > 1 and drafter.mask_inputs() is None

    # ---- memory ----

    def saved(self) -> tuple[int, int]:
        """Return the bytes of activations and of the loss at the moment of the backward with most of both."""
        drafter, size, wide = self._drafter, self.size, self._drafter.dtype.itemsize
        narrow = self._half.itemsize if self._half else wide
        total = features = self.num_tokens * len(drafter.feature_layers) * size * self._target.dtype.itemsize
        inner, at_once, row_bytes = 0, self._depths if self._stepwise else 1, self._labels * size * wide
        for layer in self._layers:
            per_row, fixed = self._probe(layer, self._decoder_layer(layer))
            total += per_row * self._num_rows + fixed + self._attention_bytes()
            inner = max(module.out_features for module in layer.modules() if isinstance(module, nn.Linear))
        if self._layers:
            width = _width(self._layers[0])
            total += features * wide // self._target.dtype.itemsize + 2 * self.num_tokens * width * wide
        if self._stepwise:
            pairs = self._depths * (self._depths + 1)
            total += self.num_tokens * (self._depths * size * wide + pairs * self._core.key_bytes)
        for head in self._heads:
            per_row, fixed = self._probe(head, head)
            total += (per_row + size * wide) * self._labels / self._depths + fixed
        if self._trains_target:
            layer, num_layers = self._target.base_model.layers[0], len(self._target.base_model.layers)
            total += self._probe(layer, self._decoder_layer(layer))[0] * self.num_tokens * num_layers
        held, chunk, product_bytes = self._loss_bytes()
        # At the loss: the final norm's rows and their gradients, first with a chunk of logits, then in two dtypes.
        norm = 0 if not self._layers else 3 if any(True for _ in drafter.norm.parameters()) else 1
        at_loss = norm * row_bytes + self._labels * size * product_bytes + self._further_bytes()
        # In the last layer: two gradients as wide as the MLP; or four of attention in fp32, when the MLP's are gone.
        mlp = 2 * (inner * narrow + size * wide) * self._num_rows
        attention = 16 * self._num_queries * self._core.width - 4 * inner * narrow * self._num_rows
        moments = [(at_loss, chunk), (at_loss + 2 * row_bytes // max(1, len(self._heads)), 0)]
        activations, loss = max(*moments, (mlp // at_once, 0), (attention // at_once, 0), key=sum)
        return int(total + activations), int(loss + held)

    def _attention_bytes(self) -> int:
        """Return the bytes of queries, outputs, keys and values on the grid, and of the rows that were put there."""
        core, queries, keys = self._core, self._num_queries, self._num_keys
        rows = 0 if self._groups.is_full else self._num_rows
        return (2 * queries + rows) * core.width * core.itemsize + 2 * (keys + rows) * core.key_bytes

    def _loss_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of an own head's gradient and copies, of a chunk of logits, and of a number in a product."""
        drafter, head, taught = self._drafter, self._drafter.vocab.head(), self._drafter.needs_teacher
        own, number, weight_bytes = drafter.vocab.own_heads, head.weight.element_size(), tensor_bytes([head.weight])
        product = self._half.itemsize if self._half and number == 4 else number
        rows = self._labels // max(1, len(self._heads))
        rows = min(chunk_rows(head.out_features, self.size, bool(own), self._device_type), rows)
        block = max(1, BLOCK_ELEMENTS // head.out_features) if self._device_type == "cpu" else rows
        # fp32 copies of logits: KL and cross entropy have code that works in place.
        copies = 1 if not taught else 3 if loss_weights(drafter.config.loss) == {"kl": 1.0} else 8
        chunk = head.out_features * (rows * product * (1 + taught) + 4 * copies * min(rows, block))
        if self._weighs_teacher:  # logits of all tokens, in two dtypes
            vocabulary = len(drafter.t2d)
            rows = chunk_rows(vocabulary, self.size, False, self._device_type)
            chunk = max(chunk, min(rows, self.num_tokens) * vocabulary * (product + 4))
        again = weight_bytes >= LARGE_GRADIENT_BYTES and self._args.gradient_accumulation_steps > 1
        held = 0 if not own else weight_bytes if again else weight_bytes * len(own)
        return held + (weight_bytes * product // number if own and product < number else 0), chunk, product

    def _further_bytes(self) -> int:
        """Return the bytes that the auxiliary loss saves for the backward, for kinds with `further_run`."""
        run: Callable[[Tensor], Any] | None = getattr(self._drafter, "further_run", None)
        if run is None:
            return 0
        per_row, _ = self._probe(self._drafter, run, self.size)
        return int(per_row * min(self._labels, getattr(self._drafter, "further_rows_at_once", self._labels)))

    def _decoder_layer(self, layer: nn.Module) -> Callable[[Tensor], Any]:
        config = self._target.config.get_text_config() if self._trains_target else self._drafter.layers_config
        size = head_size(config)

        def run(hidden: Tensor) -> Any:
            angles = hidden.new_empty(1, hidden.shape[1], size)
            return layer(hidden, position_embeddings=(angles, angles), cached_attention=self._core)

        return run

    def _probe(self, module: nn.Module, run: Callable[[Tensor], Any], width: int | None = None) -> tuple[float, int]:
        """Return the bytes that a module saves for each row, and for any number of rows (casts of its weights)."""
        for each in module.modules():
            places: tuple[dict[str, Any], dict[str, Any]] = each._parameters, each._buffers
            for tensors in places:
                for name, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta:
                        with self._mode:
                            fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        tensors[name] = nn.Parameter(fake, tensor.requires_grad) if name in each._parameters else fake
        weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        dtype, few, counts = next(module.parameters()).dtype, self._depths * (self._depths + 1), []
        for num_rows in (few, 2 * few):
            saved: dict[int, Any] = {}

            def pack(tensor: Tensor, saved: dict[int, Any] = saved) -> Tensor:
                storage = tensor.untyped_storage()
                saved[storage._cdata] = storage
                return tensor

            half = self._half or torch.bfloat16
            with self._mode, torch.autocast("cpu", half, enabled=self._half is not None and dtype == torch.float32):
                hidden = torch.empty(1, num_rows, width or _width(module), dtype=dtype, requires_grad=True)
                with saved_tensors_hooks(pack, lambda tensor: tensor):
                    run(hidden)
            counts.append(sum(storage.nbytes() for key, storage in saved.items() if key not in weights))
        per_row = (counts[1] - counts[0]) / few
        return per_row, round(counts[0] - per_row * few)

    # ---- FLOPs ----

    def flops(self, is_offline: bool) -> dict[str, float]:
        """Return FLOPs by part: 2 for each weight and row, and attention's products."""
        drafter, config = self._drafter, self._target.config.get_text_config()
        own_heads = drafter.vocab.own_heads
        num_layers = config.num_hidden_layers
        read = max(num_layers if layer < 0 else layer for layer in required_layers(drafter)) / num_layers
        heads = config.num_attention_heads * head_size(config)
        target = (
            2.0 * self.num_tokens * (num_weights(self._target.base_model) + num_layers * self._length * heads) * read
        )
        layers, heads = (sum(map(num_weights, modules)) for modules in (self._layers, self._heads))
        head = drafter.vocab.head().weight.numel()
        counted = {id(each) for part in (*self._layers, *self._heads, *own_heads) for each in part.modules()}
        others = sum(num_weights(m) for m in drafter.modules() if id(m) not in counted and not any(m.children()))
        forward = 2.0 * (layers * self._num_rows + heads * self._labels / self._depths + others * self.num_tokens)
        forward += 2.0 * self._length * self._core.width * self._num_queries * len(self._layers)
        is_frozen = not any(p.requires_grad for layer in self._layers for p in layer.parameters()) and bool(
            self._layers
        )
        taught = self._labelled_tokens if self._device_type == "cpu" else self._labels
        through_head = 2.0 * head * (self._labels * (2 + bool(own_heads)) + taught * drafter.needs_teacher)
        if self._weighs_teacher:
            through_head += 2.0 * taught * self.size * len(drafter.t2d)
        backward = forward * (1 if is_frozen else 2)
        if self._trains_target:
            target, backward = target * (1 + drafter.needs_teacher), backward + target
        muon = 0.0
        for name in muon_parameters(drafter) if self._args.optimizer == "muon" else []:
            small, large = sorted(drafter.get_parameter(name).shape)
            muon += MUON_ITERATIONS * (4.0 * small**2 * large + 2.0 * small**3)
        return {
            "target forward": 0.0 if is_offline else target,
            "drafter forward": forward,
            "LM head": through_head,
            "backward": backward,
            "optimiser step": muon,
        }


def num_weights(module: nn.Module) -> float:
    """Count the weights that a row is multiplied with; of a mixture of experts only the active ones."""
    config = getattr(module, "config", None)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / (getattr(config, "num_experts", None) or 1)
    layers = [each for each in module.modules() if not isinstance(each, nn.Embedding)]
    weights = [weight for layer in layers for weight in layer.parameters(recurse=False)]
    return sum(weight.numel() * (share if weight.ndim == 3 else 1) for weight in weights if weight.ndim > 1)


def _width(module: nn.Module) -> int:
    """Return the input size of a module, that of its first linear layer."""
    return next(each.in_features for each in module.modules() if isinstance(each, nn.Linear))


class _AttentionCore:
    """Stand-in for attention, which records the sizes of queries and keys and saves nothing for the backward."""

    width = key_bytes = itemsize = 0

    def attend(self, _layer: int, q_bhnd: Tensor, k_bhnd: Tensor, v_bhnd: Tensor, _scale: float) -> Tensor:
        """Return [1, N, H, Dh], which depends on all of them."""
        self.width, self.itemsize = q_bhnd.shape[1] * q_bhnd.shape[3], q_bhnd.element_size()
        self.key_bytes = k_bhnd.shape[1] * k_bhnd.shape[3] * v_bhnd.element_size()
        return _Core.apply(q_bhnd, k_bhnd, v_bhnd)


class _Core(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, q_bhnd: Tensor, _k: Tensor, _v: Tensor) -> Tensor:
        return torch.empty_like(q_bhnd).transpose(1, 2).contiguous()
