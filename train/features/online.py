"""The features of a training step, computed in the step itself.

Shapes: B batch, S sequence, D hidden, F features.
"""

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.target.features import target_features


def training_features(
    drafter: Drafter, target: PreTrainedModel, ids_bs: Tensor, positions_bs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """[B, S, F] for the drafter and, if its loss has a teacher, [B, S, D] final ones: from one forward if possible."""
    if drafter.trains_target:
        teacher_features = None
        if drafter.needs_teacher:
            with drafter.original_target():
                teacher_features = target_features(target, ids_bs, None, positions_bs)
        layers = drafter.feature_layers
        return target_features(target, ids_bs, None, positions_bs, layers, with_gradient=True), teacher_features
    return drafter.split_features(target_features(target, ids_bs, None, positions_bs, drafter.layers_read))
