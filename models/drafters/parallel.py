"""ParallelSpec's parallel drafter, Medusa flavour (arXiv 2410.05589, section 4).

One decoder layer of the target's own kind reads the newest token and K trainable [MASK] vectors and predicts, in one
forward, the next K+1 tokens. It is trained on all groups of a sequence together (`base/group_wise.py`):
with group attention (`groups/attention.py`) over the rows that carry a label (`groups/layout.py`). It is decoded with
plain causal attention over its own KV cache (`decoding/decoders.py`).

Where we decide what the paper leaves open:
* `inputs`: `embedding` = e(x_t), the paper's by its parameters (202 M of a 7B target, 317 M of a 13B one: a layer
  alone); `hidden` = h_{t-1}, the feature that predicted x_t; `both` = a linear map of the two, each normalised.
* The loss of depth j+1 is averaged over its own labels, then weighted with lambda_j / sum(lambda), Medusa's 0.8**j.
* The layer starts as the target's last one (`init`), and next to features [MASK]s are scaled to an RMS of 1.

`markov_rank` is not the paper's: with it drafts depend on the token before (`base/draft_vocab.py`).

vLLM serves it in full by draftsmith's plugin (`formats/vllm_parallel.py`).

Shapes: G = K+1 depths, K masks, D hidden, E = D input width of a layer, F features.
"""

from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.group_wise import GroupWiseDrafter, MaskOptions, draw_near_mean_embedding
from draftsmith.models.base.options import (
    FirstToken,
    Init,
    IntermediateSize,
    Layers,
    Loss,
    MaskResidual,
    NumLayers,
    ascending_layers,
)
from draftsmith.models.groups.layers import narrow_mlp
from draftsmith.models.kernels.cpu_layers import CpuLayers
from draftsmith.models.target.features import FINAL_FEATURES


class ParallelConfig(DrafterConfig):
    model_type = MODEL_TYPE_PREFIX + "parallel"
    published_as = "parallelspec"

    class Options(MaskOptions):
        """The keys of `drafter.options` in a recipe."""

        num_layers: NumLayers = 1
        intermediate_size: IntermediateSize = None
        inputs: Literal["embedding", "hidden", "both"] = Field(
            "both",
            description="input of the newest token's row: its embedding (the paper's, by its number of "
            "parameters), the target's hidden state, or both",
        )
        loss: Loss = "ce"
        mask_residual: MaskResidual = False
        shared_mask: bool = Field(
            False,
            description="one [MASK] vector for all depths, which differ by their positions only, in place of K "
            "vectors (not in the paper; PARD's, arXiv 2504.18583)",
        )
        init: Init = "target"
        first_token: FirstToken = True
        layers: Layers = Field(None, validate_default=True)
        feature_layers: Annotated[
            list[int], AfterValidator(lambda layers, info: ascending_layers(layers, info, FINAL_FEATURES))
        ] = Field(
            [FINAL_FEATURES],
            description="target layers whose hidden states are concatenated as the feature: k = after k layers, "
            "-1 = after the final norm, the LM head's input. EAGLE-3's idea",
        )


class ParallelDrafter(GroupWiseDrafter):
    """The drafter q; see the module's docstring."""

    config_class = ParallelConfig

    def build(self, config: DrafterConfig) -> None:
        super().build(config)
        hidden_size = self.layers_config.hidden_size
        self.masks = nn.Parameter(torch.randn(1 if config.shared_mask else config.num_masks, hidden_size))
        if config.inputs != "embedding":
            parts = len(config.feature_layers) + (config.inputs == "both")
            self.feature_norm = nn.RMSNorm(hidden_size, eps=1e-6)
            self.fuse = nn.Linear(hidden_size * parts, hidden_size, bias=False)
        if config.inputs == "both":
            self.embedding_norm = nn.RMSNorm(hidden_size, eps=1e-6)

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Draw masks near the mean embedding; fusion starts as a sum, layers, by `init`, as the target's last ones."""
        draw_near_mean_embedding(self.masks, target)
        if self.config.inputs != "embedding":
            self.masks.div_(self.masks.pow(2).mean(-1, keepdim=True).sqrt())
            self.fuse.weight.normal_(0.0, self.fuse.in_features**-0.5 / 4)
            for block in self.fuse.weight.split(self.fuse.out_features, dim=1):
                block.diagonal().add_(1.0)
        if self.takes_target_layers:
            source = target.base_model
            for layer, source_layer in zip(self.layers, source.layers[-len(self.layers) :], strict=True):
                layer.load_state_dict(narrow_mlp(source_layer.state_dict(), self.layers_config.intermediate_size))
            self.norm.load_state_dict(source.norm.state_dict())

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """Return inputs [..., E] of the newest tokens from x_t [...] and h_{t-1} [..., F]."""
        dtype = self.masks.dtype
        if self.config.inputs == "embedding":
            return self.attached.embedding(input_ids).to(dtype)
        # Each layer's own part is normalised by itself: residual streams grow from layer to layer.
        num_layers = len(self.config.feature_layers)
        parts = previous_features.to(dtype).unflatten(-1, (num_layers, -1))
        read = self.feature_norm(parts).flatten(-2)
        if self.config.inputs == "both":
            read = torch.cat([self.embedding_norm(self.attached.embedding(input_ids).to(dtype)), read], dim=-1)
        return self.fuse(read)

    def cpu_layers(self) -> CpuLayers | None:
        """Return its layers as one call on a CPU, whose inputs are computed in one operation too."""
        layers = super().cpu_layers()
        if layers is not None and self.config.inputs != "embedding":
            norms, embedding = [self.feature_norm] * len(self.config.feature_layers), None
            if self.config.inputs == "both":
                norms, embedding = [self.embedding_norm, *norms], self.attached.embedding
            layers.set_fusion(self.fuse, norms, embedding, self.mask_inputs(), self.mask_residual)
        return layers

    def mask_inputs(self) -> Tensor:
        return self.masks.expand(self.config.num_masks, -1)


DRAFTER = ParallelDrafter
