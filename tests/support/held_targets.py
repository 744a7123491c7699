"""What each of two processes over gloo holds of a frozen target, for tests to start by `multiprocessing`."""

import json
import os
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target import loading
from draftsmith.models.target.features import decoder_layers, target_features
from draftsmith.recipes.schema import Recipe
from draftsmith.train.processes.frozen_target import load_frozen_target, outside_the_launch, sync_models


def hold_target(rank: int, port: int, recipe: Recipe, folder: str) -> None:
    """Write `<rank>.json` into the folder: bytes of the layers held here, files read, features, drafter."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    reads, load_weights = [], loading.load_weights

    def counted(*args: object, **options: object) -> object:
        reads.append(1)
        return load_weights(*args, **options)  # type: ignore[arg-type]

    loading.load_weights = counted
    device = torch.device("cpu")
    with outside_the_launch():
        target = load_frozen_target(recipe, device)
        torch.manual_seed(0)
        drafter = load_drafter_class(recipe.drafter.kind).from_target(target, recipe.drafter.options)
        sync_models(recipe, target, drafter, device)
    ids = torch.arange(3, 15)[None]
    offline = recipe.data.features.source == "offline"
    layers = [] if offline else decoder_layers(target)
    assert len(target.base_model.layers) == len(layers)
    held = [p.to_local() if isinstance(p, DTensor) else p for layer in layers for p in layer.parameters()]
    features = torch.zeros(1) if offline else target_features(target, ids, layers=(1, 3, -1))
    drafted = {name: tensor.double().sum().item() for name, tensor in drafter.state_dict().items()}
    found = {
        "layer_bytes": sum(tensor.numel() * tensor.element_size() for tensor in held),
        "reads": len(reads),
        "features": features.flatten().tolist(),
        "head": target.get_output_embeddings().weight.flatten().tolist(),
        "drafter": drafted,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()
