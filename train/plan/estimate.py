"""Memory and FLOPs of one training step, in closed form from the shapes of target and drafter.

Both are built without weights. The rows that go through a layer follow from the batch's labels, as in training; what a
layer saves for its backward, from the widths of its parts. docs/results/machinery/plan_estimate.json compares the sums
with steps that were counted operation by operation.

Shapes: B batch, S sequence, P = B*S tokens, G depths, N rows of the layers, M labels, D hidden, V drafted tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from draftsmith.errors import UserError
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.cpu_layers import head_size
from draftsmith.models.groups.layout import Groups
from draftsmith.models.loss import BLOCK_ELEMENTS, chunk_rows, loss_weights
from draftsmith.models.target.features import decoder_layers, drop_decoder_layers, required_layers
from draftsmith.models.target.loading import target_device
from draftsmith.models.target.quantized import saved_bytes
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.optimizer import muon_with_adamw
from draftsmith.train.drafter.training_arguments import DrafterTrainingArguments, enable_gradient_checkpointing
from draftsmith.train.features.cache import check_offline_support
from draftsmith.train.features.without_weights import models_without_weights

LATE_STEP = 1 << 40  # a drafter that warms up is planned as it is afterwards
SAME_INPUT = ("k_proj", "v_proj", "up_proj", "lora_A", "lora_B")  # they read what another layer reads too


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
    device_type = target_device(recipe.target).type
    flops = step_flops(target, drafter, batch, device_type)
    if is_offline:
        flops.pop("target forward")
        drop_decoder_layers(target)
    feature_bytes = batch["input_ids"].numel() * len(required_layers(drafter)) * drafter.config.hidden_size
    feature_bytes *= target.dtype.itemsize
    if is_offline:  # the Trainer fetches all batches of a step before the first
        disk_bytes = getattr(torch, recipe.data.features.dtype).itemsize
        feature_bytes += accumulation * feature_bytes * disk_bytes // target.dtype.itemsize
    drafter_ids = {id(parameter) for parameter in drafter.parameters()}  # a LoRA is part of both models
    target_tensors = [p for p in (*target.parameters(), *target.buffers()) if id(p) not in drafter_ids]
    gradient_bytes = tensor_bytes(trained_parameters(drafter))
    activation_bytes, loss_bytes = step_bytes(args, target, drafter, batch, device_type)
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
    return StepCost(peak, phases[peak], flops, int(batch["attention_mask"].sum()), target, drafter)


def trained_parameters(drafter: Drafter) -> list[nn.Parameter]:
    """Return the parameters that training changes."""
    return [parameter for parameter in drafter.parameters() if parameter.requires_grad]


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of these tensors, each counted once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def half_dtype(args: DrafterTrainingArguments) -> torch.dtype | None:
    """Return the dtype of autocast, if training has it."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


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


# ---- memory ----


def step_bytes(
    args: DrafterTrainingArguments,
    target: PreTrainedModel,
    drafter: Drafter,
    batch: dict[str, Tensor],
    device_type: str,
) -> tuple[int, int]:
    """Return the bytes of activations, and of the loss, at the moment of the backward with most of them."""
    groups, shape = _groups(drafter, batch), drafter.config
    tokens, labels = batch["input_ids"].numel(), len(groups.labelled_m)
    size, depths = shape.hidden_size, shape.num_depths
    (batch_size, grid_depths, length), context = groups.core_shape, min(groups.first_depth, 1)
    rows = sum(groups.counts_r[context:])  # of a context, layers make keys and values alone
    half, wide = half_dtype(args), drafter.dtype.itemsize
    narrow = half.itemsize if half else wide
    layers, own_heads = list(getattr(drafter, "layers", [])), drafter.vocab.own_heads
    features = tokens * len(drafter.feature_layers) * size
    saved = features * target.dtype.itemsize + narrow * drafter.saved_values(rows, labels)
    if layers:
        config = drafter.layers_config
        width, key_width, inner = _widths(config)
        scattered = 0 if groups.is_full else rows
        queries, keys = (batch_size * (grid_depths - skipped) * length for skipped in (context, 0))
        attention = (2 * queries + scattered) * width + 2 * (keys + scattered) * key_width
        # Depths that follow one another, each on the outputs of the one before: no masks stand for them.
        is_stepwise = depths > 1 and drafter.mask_inputs() is None
        if is_stepwise:
            saved += tokens * (depths * size * wide + depths * (depths + 1) * key_width * narrow)
        saved += (features + 2 * tokens * size) * wide
        for layer in layers:
            copies = num_weights(layer) * narrow if narrow < wide else 0  # of its weights, by autocast
            saved += rows * row_bytes(layer, config, wide, narrow) + round(copies) + attention * narrow
        mlp_bytes = 2 * (inner * narrow + size * wide) * rows // (depths if is_stepwise else 1)
    else:
        widths = sum(2 * module.out_features for module in _own_modules(drafter) if isinstance(module, nn.Linear))
        saved, mlp_bytes = saved + (widths * labels // depths + size * labels) * wide, 0
    if _trains(target):
        config, (layer, *_) = target.config.get_text_config(), decoder_layers(target)
        saved += tokens * config.num_hidden_layers * row_bytes(layer, config, wide, wide)
    # At the loss there are the final norm's rows and their gradients, and a chunk of logits.
    head, is_taught = drafter.vocab.head(), drafter.needs_teacher
    product = half.itemsize if half and head.weight.element_size() == 4 else head.weight.element_size()
    chunk = chunk_rows(head.out_features, size, bool(own_heads), device_type)
    chunk = min(chunk, labels if layers else labels // depths)
    block = max(1, BLOCK_ELEMENTS // head.out_features) if device_type == "cpu" else chunk
    # fp32 copies of logits: KL and cross entropy have code that works in place.
    copies = 1 if not is_taught else 3 if loss_weights(shape.loss) == {"kl": 1.0} else 8
    fp32_bytes = 4 * copies * min(chunk, block)
    chunk_bytes = head.out_features * (chunk * product * (1 + is_taught) + fp32_bytes)
    at_loss = (4 if layers else 2) * labels * size * wide
    if mlp_bytes > at_loss + chunk_bytes:  # in the last layer instead: two gradients as wide as its MLP
        at_loss, chunk_bytes = mlp_bytes, 0
    return saved + at_loss, chunk_bytes + tensor_bytes(each.weight for each in own_heads)


def row_bytes(layer: nn.Module, config: Any, wide: int, narrow: int) -> int:
    """Return the bytes that a decoder layer saves per row for its backward, without those of attention.

    Of each norm its input and its result, of each linear layer its input, and of the MLP what its activation reads and
    gives, and the product. Under autocast, into `narrow` bytes, every linear layer has a copy of its input.
    """
    width, key_width, inner = _widths(config)
    norms = inputs = 0
    for path, module in layer.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            is_read_again = any(part in SAME_INPUT for part in path.split("."))
            inputs += 0 if is_read_again and narrow == wide else module.in_features
        elif name.endswith("norm") and any(True for _ in module.parameters()):
            norms += {"q_norm": width, "k_norm": key_width}.get(name, config.hidden_size)
    is_trained = any(parameter.requires_grad for parameter in layer.parameters())
    return norms * (1 + is_trained) * wide + (inputs * is_trained + 3 * inner) * narrow


def _widths(config: Any) -> tuple[int, int, int]:
    """Return the width of a layer's queries, of its keys, and of its MLP: of all experts that a token takes."""
    size, heads = head_size(config), config.num_attention_heads
    of_expert = getattr(config, "moe_intermediate_size", None)
    inner = of_expert or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner *= getattr(config, "num_experts_per_tok", None) or 1
    return heads * size, (getattr(config, "num_key_value_heads", None) or heads) * size, inner


def _groups(drafter: Drafter, batch: dict[str, Tensor]) -> Groups:
    return drafter.groups(batch["input_ids"], batch["loss_mask"], batch.get("position_ids"))


def _own_modules(drafter: Drafter) -> list[nn.Module]:
    """Return the drafter's modules outside its decoder layers, its LM heads and the target."""
    vocab = drafter.vocab
    outside = [*getattr(drafter, "layers", []), *vocab.own_heads, vocab.head(), drafter.attached.target]
    outside_ids = {id(module) for each in outside for module in each.modules()}
    return [module for module in drafter.modules() if id(module) not in outside_ids]


def _trains(target: PreTrainedModel) -> bool:
    return any(parameter.requires_grad for parameter in target.parameters())


# ---- FLOPs ----


def step_flops(
    target: PreTrainedModel, drafter: Drafter, batch: dict[str, Tensor], device_type: str
) -> dict[str, float]:
    """Return FLOPs by part: 2 for each weight and row, and attention's products."""
    groups, config = _groups(drafter, batch), target.config.get_text_config()
    (batch_size, grid_depths, grid_length), context = groups.core_shape, min(groups.first_depth, 1)
    labels, tokens, length = len(groups.labelled_m), batch["input_ids"].numel(), batch["input_ids"].shape[1]
    layers, num_layers = list(getattr(drafter, "layers", [])), config.num_hidden_layers
    read = max(num_layers if layer < 0 else layer for layer in required_layers(drafter)) / num_layers
    attention = num_layers * length * _widths(config)[0]
    through_target = 2.0 * tokens * (num_weights(target.base_model) + attention) * read
    others = sum(num_weights(module) for module in _own_modules(drafter) if not any(module.children()))
    forward = 2.0 * others * (tokens if layers else labels / drafter.config.num_depths)
    if layers:
        queries = batch_size * (grid_depths - context) * grid_length
        in_layers = sum(map(num_weights, layers)) * sum(groups.counts_r[context:])
        forward += 2.0 * (in_layers + length * _widths(drafter.layers_config)[0] * queries * len(layers))
    is_frozen = bool(layers) and not any(p.requires_grad for layer in layers for p in layer.parameters())
    taught = int(batch["loss_mask"].sum()) if device_type == "cpu" else labels  # tokens, or each row by itself
    head_rows = labels * (2 + bool(drafter.vocab.own_heads)) + taught * drafter.needs_teacher
    backward = forward * (1 if is_frozen else 2)
    if _trains(target):
        through_target, backward = through_target * (1 + drafter.needs_teacher), backward + through_target
    return {
        "target forward": through_target,
        "drafter forward": forward,
        "LM head": 2.0 * drafter.vocab.head().weight.numel() * head_rows,
        "backward": backward,
    }


def num_weights(module: nn.Module) -> float:
    """Count the weights that a row is multiplied with; of experts those that a token takes."""
    config = getattr(module, "config", None)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / (getattr(config, "num_experts", None) or 1)
    layers = [each for each in module.modules() if not isinstance(each, nn.Embedding)]
    weights = [weight for layer in layers for weight in layer.parameters(recurse=False)]
    return sum(weight.numel() * (share if weight.ndim == 3 else 1) for weight in weights if weight.ndim > 1)
