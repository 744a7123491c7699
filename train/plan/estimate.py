"""Estimates of the memory that training occupies between steps and of a step's FLOPs, from the models' shapes.

Target and drafter are built without weights. The rows that pass through a layer follow from the batch's labels.
Activations are not estimated: `measure.py` runs a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.groups.layout import Groups
from draftsmith.models.kernels.cpu_layers import head_size
from draftsmith.models.target.features import drop_decoder_layers, required_layers
from draftsmith.models.target.loading import target_device
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.optimizer import muon_parameters
from draftsmith.train.drafter.training_arguments import DrafterTrainingArguments
from draftsmith.train.features.stored import check_offline_support
from draftsmith.train.features.write import models_without_weights

LATE_STEP = 1 << 40  # a drafter that warms up is planned as it is afterwards
# Bytes of an optimiser's state for each parameter, by a part of its name; of AdamW and its kin 8, two fp32 moments.
STATE_BYTES = {"8bit": 2, "4bit": 1, "adafactor": 0, "lomo": 0, "sgd": 0, "lion": 4, "rmsprop": 4, "adagrad": 4}
ADAMW_STATE_BYTES = 8


@dataclass(frozen=True)
class StepCost:
    """Estimated cost of a training step: bytes kept between steps by part (target, ...), FLOPs, and tokens."""

    bytes: dict[str, int]
    target_flops: float
    drafter_flops: float
    tokens: int
    target: PreTrainedModel
    drafter: Drafter

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of memory that are occupied between steps: the sum over all parts."""
        return sum(self.bytes.values())


def step_cost(recipe: Recipe, args: DrafterTrainingArguments, length: int, labelled: int) -> StepCost:
    """Estimate a step of one process on a batch of rows of `length` tokens; the last `labelled` of each carry loss.

    Raises:
        UserError: The target's config cannot be read, an option is wrong, or the kind needs the whole target.
    """
    online = recipe.data.features.source == "online"
    if not online:
        check_offline_support(recipe)
    target, drafter = models_without_weights(recipe)
    drafter.train().training_step = LATE_STEP
    drafter.generator = torch.Generator().manual_seed(recipe.seed)  # of the rows that are drawn at random
    ids_bs = torch.zeros(args.per_device_train_batch_size, length, dtype=torch.long)
    mask_bs = (torch.arange(length) >= length - labelled).long().expand_as(ids_bs)
    groups, device_type = drafter.groups(ids_bs, mask_bs), target_device(recipe.target).type
    target_flops, drafter_flops = step_flops(target, drafter, groups, int(mask_bs.sum()), device_type)
    if not online:
        target_flops = 0.0
        drop_decoder_layers(target)
    trained = trained_parameters(drafter)
    name = str(getattr(args.optim, "value", args.optim))
    state_bytes = next((size for part, size in STATE_BYTES.items() if part in name), ADAMW_STATE_BYTES)
    matrices = muon_parameters(drafter) if args.optimizer == "muon" else []  # with one moment each
    saved = (ADAMW_STATE_BYTES // 2) * sum(drafter.get_parameter(matrix).numel() for matrix in matrices)
    memory = {
        "target": tensor_bytes([*target.parameters(), *target.buffers()]),
        "drafter": tensor_bytes([*drafter.parameters(), *drafter.buffers()]),
        "gradients": tensor_bytes(trained),
        "optimiser": state_bytes * sum(parameter.numel() for parameter in trained) - saved,
    }
    return StepCost(memory, target_flops, drafter_flops, ids_bs.numel(), target, drafter)


def trained_parameters(drafter: Drafter) -> list[nn.Parameter]:
    """Return the drafter's parameters that training changes."""
    return [parameter for parameter in drafter.parameters() if parameter.requires_grad]


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of these tensors, each counted once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def half_dtype(args: DrafterTrainingArguments) -> torch.dtype | None:
    """Return the 16-bit dtype of training's autocast, or None if training does not use autocast."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def step_flops(
    target: PreTrainedModel, drafter: Drafter, groups: Groups, answer_tokens: int, device_type: str
) -> tuple[float, float]:
    """Return a step's FLOPs in (target's forward, drafter): 2 per weight and row, and those of attention."""
    config, layers = target.config.get_text_config(), list(getattr(drafter, "layers", []))
    (batch_size, depths, length), context = groups.core_shape, min(groups.first_depth, 1)
    tokens, labels = groups.input_ids.numel(), len(groups.labelled_m)
    # Of a context, layers make keys and values alone.
    rows, queries = sum(groups.counts_r[context:]), batch_size * (depths - context) * length
    read = max(config.num_hidden_layers if layer < 0 else layer for layer in required_layers(drafter))
    attention = config.num_hidden_layers * groups.input_ids.shape[1] * _query_width(config)
    in_target = 2.0 * tokens * (num_weights(target.base_model) + attention) * read / config.num_hidden_layers
    inner_rows = tokens if layers else labels / drafter.config.num_depths
    outside = [*layers, *drafter.own_heads, drafter.head()]
    outside_ids = {id(module) for each in outside for module in each.modules()}
    inner = [each for each in drafter.modules() if id(each) not in outside_ids and not any(each.children())]
    forward = 2.0 * sum(map(num_weights, inner)) * inner_rows
    if layers:
        attention = groups.input_ids.shape[1] * _query_width(drafter.layers_config) * queries * len(layers)
        forward += 2.0 * (sum(map(num_weights, layers)) * rows + attention)
    taught = answer_tokens if device_type == "cpu" else labels  # tokens, or each row by itself
    head_rows = labels * (2 + bool(drafter.own_heads)) + taught * drafter.needs_teacher
    is_frozen = bool(layers) and not any(p.requires_grad for layer in layers for p in layer.parameters())
    backward = forward * (1 if is_frozen else 2)
    return in_target, forward + backward + 2.0 * drafter.head().weight.numel() * head_rows


def num_weights(module: nn.Module) -> float:
    """Count the weights that one token is multiplied with; of a mixture of experts only the chosen ones."""
    config = getattr(module, "config", None)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / (getattr(config, "num_experts", None) or 1)
    layers = [each for each in module.modules() if not isinstance(each, nn.Embedding)]
    weights = [weight for layer in layers for weight in layer.parameters(recurse=False)]
    return sum(weight.numel() * (share if weight.ndim == 3 else 1) for weight in weights if weight.ndim > 1)


def _query_width(config: Any) -> int:
    """Return the width of a layer's queries."""
    return head_size(config) * int(config.num_attention_heads)
