"""The frozen target p of a training in several processes: it stays outside what the launcher wraps and splits.

Replicated (the default), every process reads it to its own device. Sharded (`data.features.sharded`), FSDP2 splits its
decoder layers among the processes and puts each together while it runs; embedding, final norm and LM head, which
drafters read at any time, are whole everywhere. Offline no layer stays at all. In the latter two only the first process
reads the files, into host memory, and the others take from it what they keep.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel
from transformers.integrations import deepspeed

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.kernels.cpu_kernels import pack_linears, use_grouped_sdpa
from draftsmith.models.target.features import decoder_layers, drop_decoder_layers
from draftsmith.models.target.loading import load_target, target_without_weights
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
    features = recipe.data.features
    waits = features.source == "offline" or features.sharded
    chosen = recipe.target.model_copy(update={"device": "cpu" if waits else str(device)})
    if not waits:
        target, _ = load_target(chosen)
        pack_linears(target)
        return target
    if not _has_peers():
        return load_target(chosen)[0]
    target = load_target(chosen)[0] if distributed.get_rank() == 0 else None
    return _broadcast_target(chosen, target, device)


@torch.no_grad()
def sync_models(recipe: Recipe, target: PreTrainedModel, drafter: Drafter, device: torch.device) -> None:
    """Move the drafter and the parts of the target that training needs to this process's device.

    Where the first process alone read the target, the others get its drafter; else each has made an equal one.
    """
    features = recipe.data.features
    if features.source == "offline":
        if _has_peers():
            _broadcast(drafter.state_dict().values(), device)
        drop_decoder_layers(target)
        target.to(device)
    elif features.sharded:
        _broadcast(drafter.state_dict().values(), device)
        _shard(target, device)
    else:
        return
    drafter.to(device)
    drafter.attach(target)  # again: what an earlier `attach` made is on the old device


@torch.no_grad()
def load_split_target(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """Load the target for one of several processes that run it without training: split if `sharded`, else whole.

    Raises:
        UserError: As `load_target`.
    """
    online = recipe.model_copy(deep=True)
    online.data.features.source = "online"
    with outside_the_launch():
        target = load_frozen_target(online, device)
        if online.data.features.sharded:
            _shard(target, device)
    return target


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


def _shard(target: PreTrainedModel, device: torch.device) -> None:
    """Split each layer on its own: its parts are gathered when it is called and freed when it returns."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    layer_ids = set()
    for layer in decoder_layers(target):
        whole = layer.state_dict() if distributed.get_rank() == 0 else {}
        # By default a root module stays gathered after its forward, and here every layer is a root.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        set_model_state_dict(layer, whole, options=options)
        layer_ids |= {id(tensor) for _, tensor in layer.named_parameters()}
    for _, tensor in _tensors(target):
        if id(tensor) not in layer_ids:
            tensor.data = tensor.data.to(device)
