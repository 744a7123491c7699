"""Estimates of the memory that training occupies between steps and of a step's FLOPs, from the models' shapes.

Target and drafter are built without weights. The rows that pass through a layer follow from the batch's labels.
Activations are not estimated: `measure.py` runs a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.groups.layout import Groups
from draftsmith.models.target.features import drop_decoder_layers, required_layers
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.training_arguments import DrafterTrainingArguments
from draftsmith.train.features.stored import check_offline_support
from draftsmith.train.features.write import models_without_weights

LATE_STEP = 1 << 40  # a drafter that warms up is planned as it is afterwards
# Most bytes of an optimiser's state for each parameter, by a part of its name; of AdamW 8, two fp32 moments.
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
    target_flops, drafter_flops = step_flops(target, drafter, drafter.groups(ids_bs, mask_bs))
    if not online:
        target_flops = 0.0
        drop_decoder_layers(target)
    trained = trained_parameters(drafter)
    name = str(getattr(args.optim, "value", args.optim))
    state_bytes = next((size for part, size in STATE_BYTES.items() if part in name), ADAMW_STATE_BYTES)
    memory = {
        "target": tensor_bytes([*target.parameters(), *target.buffers()]),
        "drafter": tensor_bytes([*drafter.parameters(), *drafter.buffers()]),
        "gradients": tensor_bytes(trained),
        "optimiser": state_bytes * sum(parameter.numel() for parameter in trained),
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


def step_flops(target: PreTrainedModel, drafter: Drafter, groups: Groups) -> tuple[float, float]:
    """Return a step's FLOPs in (target's forward, drafter): 2 per weight and row, without attention's own."""
    config, labels = target.config.get_text_config(), len(groups.labelled_m)
    read = max(config.num_hidden_layers if layer < 0 else layer for layer in required_layers(drafter))
    in_target = 2.0 * groups.input_ids.numel() * num_weights(target.base_model) * read / config.num_hidden_layers
    layers = list(getattr(drafter, "layers", []))  # those of `pass_embeddings` are the target's
    in_heads = {id(module) for each in [*drafter.own_heads, drafter.head()] for module in each.modules()}
    modules = {id(module): module for each in [drafter, *layers] for module in each.modules()}
    leaves = (each for key, each in modules.items() if key not in in_heads and not any(each.children()))
    body, rows = sum(map(num_weights, leaves)), sum(groups.counts_r) if layers else labels / drafter.config.num_depths
    head_rows = labels * (2 + bool(drafter.own_heads) + drafter.needs_teacher)
    return in_target, 6.0 * body * rows + 2.0 * drafter.head().weight.numel() * head_rows


def num_weights(module: nn.Module) -> float:
    """Count the weights that one token is multiplied with; of a mixture of experts only the chosen ones."""
    config = getattr(module, "config", None)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / (getattr(config, "num_experts", None) or 1)
    layers = [each for each in module.modules() if not isinstance(each, nn.Embedding)]
    weights = [weight for layer in layers for weight in layer.parameters(recurse=False)]
    return sum(weight.numel() * (share if weight.ndim == 3 else 1) for weight in weights if weight.ndim > 1)
