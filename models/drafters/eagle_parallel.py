"""ParallelSpec, EAGLE flavour (arXiv 2410.05589, section 4): EAGLE's layer drafts all depths in one forward.

The layer, its inputs and the loss of a row are those of `eagle.py`. The pair [e(x_t); h_{t-1}] is followed by K
trainable [MASK] pairs, each with an embedding and a feature of its own that go through the same `fc`; [MASK]_j of
group t, at position t+j, regresses h_{t+j} and is compared with the target's distribution of x_{t+1+j}. Training is
group-wise as for `parallel.py`; decoding is one causal forward (`ParallelDecoder`), with the target's features for
every committed token.

The paper's loss of a row is SmoothL1 plus *hard* cross entropy with the label, at weight 1 (`loss: ce`, `class_weight:
1`); our default is EAGLE's, soft and at 0.1. The paper sums over a group and averages over groups. Ours is the mean of
each depth over its own labels, weighted with lambda_j / sum(lambda): at lambda_j = 1 the paper's sum divided by K+1.
That is nothing to AdamW, which does not see the scale of a loss, but a `max_grad_norm` of 1 here is one of K+1 there.
At the end of an answer groups have fewer than K+1 labels: in the paper's sum every label counts the same, in ours those
of a deeper, rarer depth a little more. What hard against soft is worth is not measured here; of the weights: on the
quickstart's data, 1,970 steps, KL, a tree of 12 nodes has a tau of 2.42 with `class_weight` 1 and lambda_j = 1, 2.61
with 0.1 and lambda_j = 0.5**j.

`mask_residual` and `keep_ratio` are not the paper's; see `ParallelDrafterConfig`.

Shapes: K masks, D hidden, E = D input width of the layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.options import normalized_weights, number, one_of, whole_number
from draftsmith.models.drafters.eagle import EagleLayer, EagleLayerConfig


class EagleParallelConfig(EagleLayerConfig):
    """Options of the parallel EAGLE, the keys of `drafter.options` in a recipe.

    Args:
        num_masks: K; a round drafts K+1 tokens.
        depth_weights: lambda_j, K+1 numbers; or one number d for lambda_j = d**j.
        keep_ratio: Train [MASK]_j at a random keep_ratio**j of its positions; 1 keeps all.
        mask_residual: Add the newest token's input to each of its masks.

    The others are those of `EagleLayerConfig`.
    """

    model_type = MODEL_TYPE_PREFIX + "eagle_parallel"

    def __init__(
        self,
        target_config: dict[str, Any] | None = None,
        target_name_or_path: str = "",
        num_masks: int = 4,
        depth_weights: float | list[float] = 1.0,
        keep_ratio: float = 1.0,
        mask_residual: bool = False,
        attention: str = "folded",
        loss: str = "kl",
        class_weight: float = 0.1,
        feature_noise: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(target_config, target_name_or_path, attention, loss, class_weight, feature_noise, **kwargs)
        self.num_masks = whole_number("num_masks", num_masks, at_least=0)
        self.keep_ratio = number("keep_ratio", keep_ratio, above=0, at_most=1)
        self.mask_residual = one_of("mask_residual", mask_residual, (True, False))
        self.depth_weights = depth_weights
        self.resolved_depth_weights()

    @property
    def num_depths(self) -> int:
        """G, the tokens drafted in one forward."""
        return self.num_masks + 1

    def resolved_depth_weights(self) -> list[float]:
        """lambda_0..lambda_K, normalised to sum 1."""
        return normalized_weights("depth_weights", self.depth_weights, self.num_depths)


class EagleParallelDrafter(EagleLayer):
    """The drafter q; see the module's docstring."""

    config_class = EagleParallelConfig

    def build(self, config: DrafterConfig) -> None:
        super().build(config)
        # The embedding, then the feature.
        self.masks = nn.Parameter(torch.randn(config.num_masks, self.fc.in_features))

    @torch.no_grad()
    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Masks near the mean embedding, with a random feature of the size that the target's have."""
        super().initialize_from_target(target)
        vocabulary = torch.arange(target.config.vocab_size, device=target.device)
        embedding_vd = target.get_input_embeddings()(vocabulary).to(self.masks.dtype)
        noise_kd, stream_kd = torch.randn_like(self.masks).chunk(2, dim=1)
        embedding_kd = embedding_vd.mean(0) + embedding_vd.std() * noise_kd
        feature_kd = target.base_model.norm(stream_kd.to(target.dtype)).to(self.masks.dtype)
        self.masks.copy_(torch.cat([embedding_kd, feature_kd], dim=1))

    def mask_inputs(self) -> Tensor:
        """[K, E] inputs of [MASK]_1..K."""
        return self.fc(self.masks)


DRAFTER = EagleParallelDrafter
