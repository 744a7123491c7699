"""Functions for `support.processes` that record the part of a frozen target held by each of two gloo processes."""

import json

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target import loading
from draftsmith.models.target.features import decoder_layers
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.processes.frozen_target import drafter_options, load_frozen_target, move_models


def hold_targets(recipes: list[Recipe]) -> None:
    """Write `<rank>.json` into each recipe's run, sequentially in one group of processes."""
    for recipe in recipes:
        _hold_target(recipe)


def _hold_target(recipe: Recipe) -> None:
    """Write the bytes of layers held by this process, files read and drafter."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    reads, load_weights = [], loading.load_weights

    def counted(*args: object, **options: object) -> object:
        reads.append(1)
        return load_weights(*args, **options)  # type: ignore[arg-type]

    loading.load_weights = counted  # type: ignore[assignment]
    device = torch.device("cpu")
    target = load_frozen_target(recipe, device)
    torch.manual_seed(0)
    drafter = load_drafter_class(recipe.drafter.kind).from_target(target, drafter_options(recipe))
    move_models(recipe, target, drafter, device)
    DistributedDataParallel(drafter)  # which the Trainer makes of it; it copies the first process's weights
    loading.load_weights = load_weights
    dropped = recipe.data.features.source != "online"
    layers = [] if dropped else decoder_layers(target)
    assert len(target.base_model.layers) == len(layers)
    held = [parameter for layer in layers for parameter in layer.parameters()]
    drafted = {name: tensor.double().sum().item() for name, tensor in drafter.state_dict().items()}
    found = {
        "layer_bytes": sum(tensor.numel() * tensor.element_size() for tensor in held),
        "reads": len(reads),
        "drafter": drafted,
    }
    (RunFolder(recipe).root / f"{distributed.get_rank()}.json").write_text(json.dumps(found))
