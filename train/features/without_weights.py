"""A recipe's target and drafter without weights: shapes and dtypes on the meta device, whatever their size."""

import torch
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.loading import target_without_weights
from draftsmith.recipes.schema import Recipe


def models_without_weights(recipe: Recipe) -> tuple[PreTrainedModel, Drafter]:
    """Build the target and, attached to it, the drafter as at the start of training.

    Raises:
        UserError: The target's config cannot be read, or as `Drafter.from_target`.
    """
    with torch.device("meta"):
        target = target_without_weights(recipe.target)
        kind = load_drafter_class(recipe.drafter.kind)
        config = kind.make_config(target, recipe.drafter.options)
        dtype = torch.promote_types(target.dtype, torch.float32)
        return target, kind(config).to(dtype).attach(target)
