"""ParallelSpec, EAGLE flavour (arXiv 2410.05589, section 4): EAGLE's layer drafts all depths in one forward.

The layer, its inputs and the loss of a row are those of `eagle.py`. The pair [e(x_t); h_{t-1}] is followed by K
trainable [MASK] pairs, each with its own embedding and feature, which go through the same `fc`; [MASK]_j of
group t, at position t+j, regresses h_{t+j} and is compared with the target's distribution of x_{t+1+j}. Training is
group-wise as for `parallel.py`; decoding is one causal forward (`ParallelDecoder`), with the target's features for
every committed token.

The paper's loss of a row is SmoothL1 plus *hard* cross entropy with the label (`loss: ce`), with no weight between them
named; our default is EAGLE's, soft and at 0.1, which is in EAGLE's paper (w_cls) and its authors' code (`p_w`). The
paper sums over a group and averages over groups. Ours is the mean of
each depth over its own labels, weighted with lambda_j / sum(lambda): at lambda_j = 1 the paper's sum divided by K+1.
That is nothing to AdamW, which does not see the scale of a loss, but a `max_grad_norm` of 1 here is one of K+1 there.
At the end of an answer groups have fewer than K+1 labels: in the paper's sum every label counts the same, in ours those
of a deeper, rarer depth a little more. What hard against soft is worth is not measured here; of the weights: on the
quickstart's data, 1,970 steps, KL, a tree of 12 nodes has a tau of 2.42 with `class_weight` 1 and lambda_j = 1, 2.61
with 0.1 and lambda_j = 0.5**j.

`mask_residual`, here the default, `keep_ratio` and `markov_rank` are not the paper's; see `parallel.py`.

Shapes: K masks, D hidden, E = D input width of the layer.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.group_wise import MaskOptions, embeddings_of
from draftsmith.models.base.options import DepthWeights, MaskResidual
from draftsmith.models.drafters.eagle import EagleDrafter, EagleLayerOptions


class EagleParallelConfig(DrafterConfig):
    model_type = MODEL_TYPE_PREFIX + "eagle_parallel"
    published_as = "parallelspec-eagle"  # without the `eagle-` that vLLM takes for EAGLE
    not_exported = (
        "no engine supports masks in EAGLE drafters, and draftsmith's vLLM plugin only `parallel`: train with "
        "drafter.kind=parallel"
    )

    class Options(EagleLayerOptions, MaskOptions):
        """Options of `drafter.kind: eagle_parallel`: the keys of `drafter.options` in a recipe."""

        depth_weights: DepthWeights = 1.0
        mask_residual: MaskResidual = True


class EagleParallelDrafter(EagleDrafter):
    """ParallelSpec's drafter q in EAGLE flavour: EAGLE's layer with K [MASK]s, in one forward."""

    config_class = EagleParallelConfig

    def build(self, config: DrafterConfig) -> None:
        super().build(config)
        # The embedding, then the feature.
        self.masks = nn.Parameter(torch.randn(config.num_masks, self.fc.in_features))

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Initialise masks: embeddings near the target's mean embedding, random features as large as the target's."""
        embedding_vd = embeddings_of(target).to(self.masks.dtype)
        noise_kd, drawn_kd = torch.randn_like(self.masks).chunk(2, dim=1)
        embedding_kd = embedding_vd.mean(0) + embedding_vd.std() * noise_kd
        norm = getattr(target.base_model, "norm", nn.Identity())  # GPT-2 has another name for it
        feature_kd = norm(drawn_kd.to(target.dtype)).to(self.masks.dtype)
        self.masks.copy_(torch.cat([embedding_kd, feature_kd], dim=1))

    def mask_inputs(self) -> Tensor:
        return self.fc(self.masks)


DRAFTER = EagleParallelDrafter
