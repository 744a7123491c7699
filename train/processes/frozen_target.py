"""The frozen target p of a training in several processes: it stays outside what the launcher wraps and splits.

Online every process reads it to its own device. With features from disk or from servers no decoder layer stays: only
the first process reads the files, into host memory, and the others take from it what they keep. With servers, and
where the drafter does not start from the target's layers, each process reads the other weights alone.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel
from transformers.integrations import deepspeed

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.kernels.cpu_kernels import pack_linears, use_grouped_sdpa
from draftsmith.models.target.features import decoder_layers, drop_decoder_layers
from draftsmith.models.target.loading import load_ends, load_target, target_without_weights
from draftsmith.recipes.schema import Recipe, TargetRecipe

RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def outside_the_launch() -> Iterator[None]:
    """Make transformers load whole models in every process in this context.

    With FSDP's RAM-efficient loading, all processes but the first would get zeros for FSDP to fill, which never sees
    the target. Under ZeRO-3 it would split the weights: the target's for an engine that never runs it, the drafter's
    before they are initialised from the target.
    """
    setting = os.environ.pop(RAM_EFFICIENT, None)
    zero = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = zero
        if setting is not None:
            os.environ[RAM_EFFICIENT] = setting


def load_frozen_target(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """Load the target for making a drafter; call `sync_models` with both afterwards, each `outside_the_launch`.

    Args:
        device: Device of this process.

    Raises:
        UserError: As `load_target`.
    """
    if recipe.data.features.source == "online":
        target, _ = load_target(recipe.target.model_copy(update={"device": str(device)}))
        pack_linears(target)
        return target
    chosen = recipe.target.model_copy(update={"device": "cpu"})
    if recipe.data.features.source == "server" and not starts_from_layers(recipe):
        return load_ends(chosen)
    if not _has_peers():
        return load_target(chosen)[0]
    return _broadcast_target(chosen, load_target(chosen)[0] if distributed.get_rank() == 0 else None, device)


def starts_from_layers(recipe: Recipe) -> bool:
    """Return whether the drafter's first weights are those of decoder layers of the target."""
    options = load_drafter_class(recipe.drafter.kind).config_class.Options.model_fields
    if recipe.drafter.init is not None or "init" not in options:
        return False
    return recipe.drafter.options.get("init", options["init"].default) == "target"


@torch.no_grad()
def sync_models(recipe: Recipe, target: PreTrainedModel, drafter: Drafter, device: torch.device) -> None:
    """Move the drafter and the parts of the target that training needs to this process's device.

    Where the first process alone read the target, the others get its drafter; else each has made an equal one.
    """
    if recipe.data.features.source == "online":
        return
    if _has_peers():
        _broadcast(drafter.state_dict().values(), device)
    drop_decoder_layers(target)
    target.to(device)
    drafter.to(device)
    drafter.attach(target)  # again: what an earlier `attach` made is on the old device


def _has_peers() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@torch.no_grad()
def _broadcast_target(recipe: TargetRecipe, target: PreTrainedModel | None, device: torch.device) -> PreTrainedModel:
    """Return the first process's target; in the others one whose layers have addresses and take no memory."""
    dtypes = [None if target is None else {name: tensor.dtype for name, tensor in _tensors(target)}]
    distributed.broadcast_object_list(dtypes, device=device)
    if target is None:
        with torch.device("meta"):
            target = target_without_weights(recipe)
        for name, tensor in _tensors(target):
            tensor.data = tensor.data.to((dtypes[0] or {})[name])
        target = target.to_empty(device="cpu")
        target.tie_weights()
        use_grouped_sdpa(target)
    layer_ids = {id(parameter) for layer in decoder_layers(target) for parameter in layer.parameters()}
    _broadcast((tensor for _, tensor in _tensors(target) if id(tensor) not in layer_ids), device)
    return target


def _tensors(target: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the buffers whether they are saved or not."""
    yield from target.named_parameters()
    yield from target.named_buffers()


def _broadcast(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Broadcast the first process's values into the tensors, one after the other by way of the device."""
    for tensor in tensors:
        on_device = tensor.detach().to(device).contiguous()
        distributed.broadcast(on_device, 0)
        tensor.copy_(on_device)
