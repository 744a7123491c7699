"""The frozen target p of a training in several processes: it stays outside what the launcher wraps.

With `data.features.source: online` every process loads it to its own device. With features from disk or from servers
each loads only embedding, final norm and LM head. If the drafter starts from the target's layers, the first process
loads these too, into host memory; DDP gives the other processes its drafter.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.kernels.cpu_kernels import pack_linears
from draftsmith.models.target.features import drop_decoder_layers
from draftsmith.models.target.loading import load_ends, load_target
from draftsmith.recipes.run_folder import is_first_process
from draftsmith.recipes.schema import Recipe


def load_frozen_target(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """Load the target to build a drafter from; then call `move_models` with both.

    Args:
        device: Device of this process.

    Raises:
        UserError: The target cannot be loaded, or bitsandbytes would quantise it in every process.
    """
    if recipe.data.features.source == "online":
        if recipe.target.quantization is not None:
            raise UserError(
                f"key `target.quantization`: training cannot run a target in {recipe.target.quantization}: serve it by "
                "vLLM in the quantisation of its later use and set data.features.source=server, or leave the key out"
            )
        target, _ = load_target(recipe.target.model_copy(update={"device": str(device)}))
        pack_linears(target)
        return target
    chosen = recipe.target.model_copy(update={"device": "cpu"})
    return load_target(chosen)[0] if starts_from_layers(recipe) and is_first_process() else load_ends(chosen)


def drafter_options(recipe: Recipe) -> dict[str, Any]:
    """Return the options to build the drafter with in this process, which may have no layers of the target."""
    reads_layers = starts_from_layers(recipe) and is_first_process()
    online = recipe.data.features.source == "online"
    return recipe.drafter.options if online or reads_layers else options_without_layers(recipe)


def options_without_layers(recipe: Recipe) -> dict[str, Any]:
    """Return the options to build a drafter with for a target without layers: with `init: random`, if there is `init`.

    Other weights replace the random ones: those that `drafter.init` names, or the first process's.
    """
    options = recipe.drafter.options
    return {**options, "init": "random"} if "init" in _option_fields(recipe) else options


def starts_from_layers(recipe: Recipe) -> bool:
    """Return whether the drafter's first weights are those of decoder layers of the target."""
    options = _option_fields(recipe)
    if recipe.drafter.init is not None or "init" not in options:
        return False
    return recipe.drafter.options.get("init", options["init"].default) == "target"


def _option_fields(recipe: Recipe) -> dict[str, Any]:
    return load_drafter_class(recipe.drafter.kind).config_class.Options.model_fields


def move_models(recipe: Recipe, target: PreTrainedModel, drafter: Drafter, device: torch.device) -> None:
    """Move the drafter and the parts of the target that training needs to this process's device."""
    if recipe.data.features.source == "online":
        return
    drop_decoder_layers(target)
    target.to(device)
    drafter.to(device)
    drafter.attach(target)  # again: what an earlier `attach` made is on the old device
