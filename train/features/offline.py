"""Training on features from disk: the right ones for the recipe, and no more of the target than is still read."""

from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.features import drop_decoder_layers
from draftsmith.models.target.loading import weights_hash
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.features.cache import FeatureCache, FeatureIndex


def refuse_obstacle(recipe: Recipe) -> None:
    """Check that drafters of this kind can be trained on features from disk.

    Raises:
        UserError: They cannot; says why.
    """
    obstacle = load_drafter_class(recipe.drafter.kind).offline_obstacle
    if obstacle is not None:
        raise UserError(
            f"drafter.kind `{recipe.drafter.kind}` cannot be trained on features from disk, as {obstacle}: "
            "set data.features.source=online"
        )


def feature_settings(recipe: Recipe, tokens_hash: str) -> dict[str, Any]:
    """What the features depend on, by recipe key."""
    chosen = recipe.data.features
    settings = {
        "target.model": recipe.target.model,
        "target.revision": recipe.target.revision,
        "target.gguf_file": recipe.target.gguf_file,
        "target.dtype": recipe.target.dtype,
        "the target's weights (hash)": weights_hash(recipe.target),
        "data.features.engine": chosen.engine,
        "data.features.dtype": chosen.dtype,
        "data (its tokens)": tokens_hash,
    }
    settings |= {} if recipe.target.quantization is None else {"target.quantization": recipe.target.quantization}
    return settings | ({"data.features.autocast": True} if chosen.autocast else {})


def open_features(recipe: Recipe, tokens_hash: str, drafter: Drafter) -> FeatureCache:
    """The cache that `draftsmith features` wrote for this recipe, target and drafter.

    Raises:
        UserError: There is none, it is not complete, or it was made from something else.
    """
    folder = RunFolder(recipe).features
    index = FeatureIndex.read(folder)
    if index is None:
        raise UserError(
            f"{folder} holds no features, which data.features.source=offline trains on: run `draftsmith features` with "
            f"recipe `{recipe.name}` first, or set data.features.source=online"
        )
    layers = drafter.layers_read
    index.refuse_others(folder, feature_settings(recipe, tokens_hash), layers)
    return FeatureCache(folder, index, layers)


def keep_what_is_read(target: PreTrainedModel, drafter: Drafter, device: torch.device) -> None:
    """Drop the target's decoder layers, move what is left of it to the device, and the drafter too."""
    drop_decoder_layers(target)
    target.to(device)
    drafter.to(device)
    drafter.attach(target)  # again: what an `attach` made lies on the old device
