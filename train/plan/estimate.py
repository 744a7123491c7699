"""Memory and FLOPs of one training step, in closed form from the shapes of target and drafter.

Both are built without weights. The rows that go through a layer follow from the batch's labels, as in training; what a
layer saves for its backward, from the widths of its parts. docs/results/machinery/plan_estimate.json has the peaks of
steps that were counted operation by operation.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.groups.layout import Groups
from draftsmith.models.kernels.cpu_layers import head_size, num_kv_heads
from draftsmith.models.loss import BLOCK_ELEMENTS, chunk_rows, loss_weights
from draftsmith.models.target.features import drop_decoder_layers, required_layers
from draftsmith.models.target.loading import target_device
from draftsmith.models.target.quantized import saved_bytes
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.optimizer import muon_parameters
from draftsmith.train.drafter.training_arguments import DrafterTrainingArguments
from draftsmith.train.features.cache import check_offline_support
from draftsmith.train.features.write import models_without_weights

LATE_STEP = 1 << 40  # a drafter that warms up is planned as it is afterwards
SAME_INPUT = ("k_proj", "v_proj", "up_proj")  # they read what another layer reads too
# Bytes of an optimiser's state for each parameter, by a part of its name; of AdamW and its kin 8, two fp32 moments.
STATE_BYTES = {"8bit": 2, "4bit": 1, "adafactor": 0, "lomo": 0, "sgd": 0, "lion": 4, "rmsprop": 4, "adagrad": 4}
ADAMW_STATE_BYTES = 8


@dataclass(frozen=True)
class StepCost:
    """Bytes by part when most memory is in use, FLOPs and tokens of a step, and the models without weights."""

    bytes: dict[str, int]
    target_flops: float
    drafter_flops: float
    tokens: int
    target: PreTrainedModel
    drafter: Drafter

    @property
    def peak_bytes(self) -> int:
        """Return the sum of all parts."""
        return sum(self.bytes.values())


def step_cost(recipe: Recipe, args: DrafterTrainingArguments, length: int, labelled: int) -> StepCost:
    """Estimate an optimizer step of one process on rows of `length` tokens, of which the last `labelled` carry loss.

    Raises:
        UserError: As `models_without_weights`, or the recipe's training cannot be done.
    """
    is_offline, accumulation = recipe.data.features.source == "offline", args.gradient_accumulation_steps
    if is_offline:
        check_offline_support(recipe)
    target, drafter = models_without_weights(recipe)
    drafter.train().training_step = LATE_STEP
    drafter.generator = torch.Generator().manual_seed(recipe.seed)  # of the rows that are drawn at random
    ids_bs = torch.zeros(args.per_device_train_batch_size, length, dtype=torch.long)
    mask_bs = (torch.arange(length) >= length - labelled).long().expand_as(ids_bs)
    groups, device_type = drafter.groups(ids_bs, mask_bs), target_device(recipe.target).type
    target_flops, drafter_flops = step_flops(target, drafter, groups, int(mask_bs.sum()), device_type)
    values = ids_bs.numel() * len(required_layers(drafter)) * drafter.config.hidden_size
    features = values * target.dtype.itemsize
    if is_offline:
        target_flops = 0.0
        drop_decoder_layers(target)
        # The Trainer fetches all batches of a step before the first.
        features += accumulation * values * getattr(torch, recipe.data.features.dtype).itemsize
    trained = trained_parameters(drafter)
    activations, loss = step_bytes(args, target, drafter, groups, device_type)
    # Gradients take the place of freed activations, but for those of the micro-batch before.
    freed = 0 if accumulation > 1 else activations + loss
    memory = {
        "target": tensor_bytes([*target.parameters(), *target.buffers()]) - saved_bytes(recipe.target, target),
        "drafter": tensor_bytes([*drafter.parameters(), *drafter.buffers()]),
        "gradients": max(0, tensor_bytes(trained) - freed),
        "optimiser": _optimizer_bytes(args, drafter, trained),
        "features": features,
        "activations": activations,
        "loss": loss,
    }
    return StepCost(memory, target_flops, drafter_flops, ids_bs.numel(), target, drafter)


def trained_parameters(drafter: Drafter) -> list[nn.Parameter]:
    """Return the parameters that training changes."""
    return [parameter for parameter in drafter.parameters() if parameter.requires_grad]


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of these tensors, each counted once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def half_dtype(args: DrafterTrainingArguments) -> torch.dtype | None:
    """Return the dtype of autocast, if training has it."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def _optimizer_bytes(args: DrafterTrainingArguments, drafter: Drafter, trained: list[nn.Parameter]) -> int:
    name = str(getattr(args.optim, "value", args.optim))
    state_bytes = next((size for part, size in STATE_BYTES.items() if part in name), ADAMW_STATE_BYTES)
    matrices = muon_parameters(drafter) if args.optimizer == "muon" else []  # with one moment each
    saved = (ADAMW_STATE_BYTES // 2) * sum(drafter.get_parameter(matrix).numel() for matrix in matrices)
    return state_bytes * sum(parameter.numel() for parameter in trained) - saved


# ---- memory ----


def step_bytes(
    args: DrafterTrainingArguments, target: PreTrainedModel, drafter: Drafter, groups: Groups, device_type: str
) -> tuple[int, int]:
    """Return the bytes of activations, and of the loss, at the moment of the backward with most of them."""
    size, depths, head = drafter.config.hidden_size, drafter.config.num_depths, drafter.vocab.head()
    wide, layers, half = drafter.dtype.itemsize, list(getattr(drafter, "layers", [])), half_dtype(args)
    narrow = half.itemsize if half else wide
    (tokens, rows, queries, keys), labels = _row_counts(groups), len(groups.labelled_m)
    features = tokens * len(drafter.feature_layers) * size
    saved = features * target.dtype.itemsize + narrow * drafter.saved_values(rows, labels)
    # At the loss there are the final norm's rows and their gradients; these rows pass through an LM head together.
    at_loss, in_mlp, head_rows = (4 if layers else 2) * size * wide * labels, 0, labels if layers else labels // depths
    if layers:
        width, key_width, inner = _widths(drafter.layers_config)
        scattered = 0 if groups.is_full else rows
        attention = (2 * queries + scattered) * width + 2 * (keys + scattered) * key_width
        saved += (features + 2 * tokens * size) * wide
        for layer in layers:
            copies = num_weights(layer) if narrow < wide else 0  # of its weights, by autocast
            saved += rows * row_bytes(layer, drafter.layers_config, wide, narrow)
            saved += round(copies + attention) * narrow
        in_mlp = 2 * rows * (inner * narrow + size * wide)
        # Depths that follow one another, each on the outputs of the one before: no masks stand for them.
        if depths > 1 and drafter.mask_inputs() is None:
            saved += tokens * depths * (size * wide + (depths + 1) * key_width * narrow)
            in_mlp //= depths
    else:
        widths = sum(2 * module.out_features for module in _own_modules(drafter) if isinstance(module, nn.Linear))
        saved += (widths * head_rows + size * labels) * wide
    is_taught, own_heads = drafter.needs_teacher, drafter.vocab.own_heads
    chunk = min(head_rows, chunk_rows(head.out_features, size, bool(own_heads), device_type))
    block = max(1, BLOCK_ELEMENTS // head.out_features) if device_type == "cpu" else chunk
    # fp32 copies of logits: KL and cross entropy have code that works in place.
    copies = 1 if not is_taught else 3 if loss_weights(drafter.config.loss) == {"kl": 1.0} else 8
    logit_bytes = chunk * min(narrow, head.weight.element_size()) * (1 + is_taught) + 4 * copies * min(chunk, block)
    chunk_bytes = head.out_features * logit_bytes
    if in_mlp > at_loss + chunk_bytes:  # in the last layer instead: two gradients as wide as its MLP
        at_loss, chunk_bytes = in_mlp, 0
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
            is_read_again = name in SAME_INPUT
            inputs += 0 if is_read_again and narrow == wide else module.in_features
        elif name.endswith("norm") and any(True for _ in module.parameters()):
            norms += {"q_norm": width, "k_norm": key_width}.get(name, config.hidden_size)
    is_trained = any(parameter.requires_grad for parameter in layer.parameters())
    return norms * (1 + is_trained) * wide + (inputs * is_trained + 3 * inner) * narrow


def _widths(config: Any) -> tuple[int, int, int]:
    """Return the width of a layer's queries, of its keys, and of its MLP: of all experts that a token takes."""
    of_expert = getattr(config, "moe_intermediate_size", None)
    inner = of_expert or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner *= getattr(config, "num_experts_per_tok", None) or 1
    return head_size(config) * config.num_attention_heads, head_size(config) * num_kv_heads(config), inner


def _own_modules(drafter: Drafter) -> list[nn.Module]:
    """Return the drafter's innermost modules outside its decoder layers and LM heads."""
    outside = [*getattr(drafter, "layers", []), *drafter.vocab.own_heads, drafter.vocab.head()]
    outside_ids = {id(module) for each in outside for module in each.modules()}
    return [each for each in drafter.modules() if id(each) not in outside_ids and not any(each.children())]


def _row_counts(groups: Groups) -> tuple[int, int, int, int]:
    """Return the numbers of tokens, of the drafter layers' rows, and of queries and keys on the grid of attention."""
    (batch_size, depths, length), context = groups.core_shape, min(groups.first_depth, 1)
    rows = sum(groups.counts_r[context:])  # of a context, layers make keys and values alone
    return groups.input_ids.numel(), rows, batch_size * (depths - context) * length, batch_size * depths * length


# ---- FLOPs ----


def step_flops(
    target: PreTrainedModel, drafter: Drafter, groups: Groups, answer_tokens: int, device_type: str
) -> tuple[float, float]:
    """Return the FLOPs of the target's forward and of all else: 2 for each weight and row, and attention's products."""
    config, layers = target.config.get_text_config(), list(getattr(drafter, "layers", []))
    (tokens, rows, queries, _), length, labels = _row_counts(groups), groups.input_ids.shape[1], len(groups.labelled_m)
    read = max(config.num_hidden_layers if layer < 0 else layer for layer in required_layers(drafter))
    attention = config.num_hidden_layers * length * _widths(config)[0]
    in_target = 2.0 * tokens * (num_weights(target.base_model) + attention) * read / config.num_hidden_layers
    forward = (
        2.0 * sum(map(num_weights, _own_modules(drafter))) * (tokens if layers else labels / drafter.config.num_depths)
    )
    if layers:
        attention = length * _widths(drafter.layers_config)[0] * queries * len(layers)
        forward += 2.0 * (sum(map(num_weights, layers)) * rows + attention)
    taught = answer_tokens if device_type == "cpu" else labels  # tokens, or each row by itself
    head_rows = labels * (2 + bool(drafter.vocab.own_heads)) + taught * drafter.needs_teacher
    is_frozen = bool(layers) and not any(p.requires_grad for layer in layers for p in layer.parameters())
    backward = forward * (1 if is_frozen else 2)
    return in_target, forward + backward + 2.0 * drafter.vocab.head().weight.numel() * head_rows


def num_weights(module: nn.Module) -> float:
    """Count the weights that a row is multiplied with; of experts those that a token takes."""
    config = getattr(module, "config", None)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / (getattr(config, "num_experts", None) or 1)
    layers = [each for each in module.modules() if not isinstance(each, nn.Embedding)]
    weights = [weight for layer in layers for weight in layer.parameters(recurse=False)]
    return sum(weight.numel() * (share if weight.ndim == 3 else 1) for weight in weights if weight.ndim > 1)
