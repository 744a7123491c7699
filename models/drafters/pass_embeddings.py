"""PaSS, parallel speculative sampling (arXiv 2311.13581): the frozen target drafts for itself.

T trainable look-ahead embeddings follow the newest token; one forward of the target itself gives its own next
token and, at the embeddings, T drafted ones. Nothing else is trained: T * D parameters.

This is the parallel drafter with the target's own layers and norm in place of one new layer, so it is trained by the
same group attention and decoded by the same decoder. The gradient passes through the frozen layers. What follows:
* Depth 1 is exactly what the target predicts next, so every round commits at least two tokens (unless a
  `draft_vocab_size` leaves it out); but a draft costs a whole forward of the target, and a round two.
* No feature is read. (Those of layer 0 are requested, since they cost the target nothing.)

Where we deviate: the paper's single model keeps one KV cache; here the drafting side has its own, so the committed
tokens go through the layers twice. Beyond a target's sliding window depth 1 is exact only with the same
`sliding_window` here; the output always is.

Shapes: B batch, S sequence, G = T+1 depths, D hidden.
"""

from typing import Self

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.group_wise import GroupWiseDrafter, MaskOptions, draw_near_mean_embedding
from draftsmith.models.base.options import DepthWeights, Loss
from draftsmith.models.groups.layers import build_target_layers, layers_config
from draftsmith.recipes.schema import MOST_DEPTHS


class PassEmbeddingsConfig(DrafterConfig):
    model_type = MODEL_TYPE_PREFIX + "pass_embeddings"
    not_exported = "no engine drafts with the target's own layers and masks: train with drafter.kind=parallel"

    class Options(MaskOptions):
        """Options of `drafter.kind: pass_embeddings`. The weight of depth 1 has no effect: its draft is exact."""

        num_masks: int = Field(
            4, ge=1, le=MOST_DEPTHS, description="T, the number of look-ahead embeddings; a round drafts T+1 tokens"
        )
        loss: Loss = "ce"
        depth_weights: DepthWeights = 1.0


class PassEmbeddingsDrafter(GroupWiseDrafter):
    """PaSS's drafter q: the target's own layers. Its only parameters are T look-ahead embeddings, `masks` [T, D]."""

    config_class = PassEmbeddingsConfig
    offline_obstacle = "it reads no features: its own forward runs the target's layers"

    def build(self, config: DrafterConfig) -> None:
        self.layers_config = layers_config(config.target_config, config.target_config.get("num_hidden_layers", 1))
        self.masks = nn.Parameter(torch.randn(config.num_masks, self.layers_config.hidden_size))
        self.feature_layers = (0,)

    def attach(self, target: PreTrainedModel) -> Self:
        """Borrow the target's layers too: copies that share its weights, with this package's group attention."""
        super().attach(target)
        with torch.device("meta"):
            layers, _ = build_target_layers(self.layers_config)
        for layer, source in zip(layers, target.base_model.layers, strict=True):
            _share_weights(layer, source)
        # In eval mode for good: the target that is drafted for has no dropout. Past torch, which would make them parts
        # of the drafter.
        self.__dict__.update(layers=layers.eval(), norm=target.base_model.norm)
        return self

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Draw the look-ahead embeddings near the mean of the target's embeddings."""
        draw_near_mean_embedding(self.masks, target)

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """Return the layers' inputs, embeddings [..., D] of tokens [...], in the target's dtype; read no features."""
        return self.attached.embedding(input_ids)

    def mask_inputs(self) -> Tensor:
        """Return the T look-ahead embeddings [T, D], in the target's dtype."""
        return self.masks.to(next(self.attached.embedding.parameters()).dtype)


def _share_weights(copy: nn.Module, source: nn.Module) -> None:
    """Share the source's parameters and buffers, as the same objects, with a copy of the same structure.

    As objects, not only their memory, so that later changes of the target (dtype, device) apply to both.
    """
    names = {name for name, _ in copy.named_parameters()}
    if names != {name for name, _ in source.named_parameters()}:
        raise ValueError(f"a {type(source).__name__} of the target does not have the parts that its config describes")
    modules = dict(source.named_modules())
    for name, module in copy.named_modules():
        module._parameters.update(modules[name]._parameters)
        module._buffers.update(modules[name]._buffers)


DRAFTER = PassEmbeddingsDrafter
