"""PaSS, parallel speculative sampling (arXiv 2311.13581): the frozen target drafts for itself.

T trainable look-ahead embeddings stand behind the newest token; one forward of the target itself gives its own next
token and, at the embeddings, T drafted ones. Nothing else is trained: T * D parameters.

This is the parallel drafter with the target's own layers and norm in place of one new layer, so it is trained by the
same group attention and decoded by the same decoder. The gradient passes through the frozen layers. What follows:
* Depth 1 is exactly what the target predicts next, so every round commits at least two tokens; but a draft costs a
  whole forward of the target, and a round two.
* No feature is read. (Those of layer 0 are asked for, since they cost the target nothing.)

Where we deviate: the paper's single model keeps one KV cache; here the drafting side has its own, so the committed
tokens go through the layers twice. A target's sliding window is not carried over: beyond it depth 1 is no longer exact,
the output still is.

Shapes: B batch, S sequence, G = T+1 streams, D hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX
from draftsmith.models.base.options import whole_number
from draftsmith.models.drafters.parallel import ParallelDrafter, ParallelDrafterConfig
from draftsmith.models.groups.layers import TargetLayers, build_target_layers, layers_config

# What PaSS does not leave open.
FIXED_OPTIONS = {"inputs": "embedding", "mask_residual": False, "init": "target"}


class PassEmbeddingsConfig(ParallelDrafterConfig):
    """Options of PaSS, the keys of `drafter.options` in a recipe.

    Args:
        num_masks: T, the look-ahead embeddings; a round drafts T+1 tokens, the first of which is always right.
        attention: Training backend: `folded`, `dense` or `flex`.
        loss: A name in `losses.LOSSES`; `ce` needs no teacher.
        depth_weights: lambda_j, T+1 numbers; or one number d for lambda_j = d**j. The first, of the target's own next
            token, moves nothing.
        keep_ratio: Train embedding j at a random keep_ratio**j of its positions; 1 keeps all.
    """

    model_type = MODEL_TYPE_PREFIX + "pass_embeddings"

    def __init__(
        self,
        target_config: dict[str, Any] | None = None,
        target_name_or_path: str = "",
        num_masks: int = 4,
        attention: str = "folded",
        loss: str = "ce",
        depth_weights: float | list[float] = 1.0,
        keep_ratio: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            target_config=target_config,
            target_name_or_path=target_name_or_path,
            num_masks=whole_number("num_masks", num_masks, at_least=1),
            attention=attention,
            loss=loss,
            depth_weights=depth_weights,
            keep_ratio=keep_ratio,
            **{**kwargs, **FIXED_OPTIONS, "num_layers": (target_config or {}).get("num_hidden_layers", 1)},
        )


class PassEmbeddingsDrafter(ParallelDrafter):
    """The drafter q, whose only parameters are `masks` [T, D]; see the module's docstring."""

    config_class = PassEmbeddingsConfig
    offline_obstacle = "it reads no features: its own forward runs the target's layers"

    def build(self, config: PassEmbeddingsConfig) -> None:
        self.layers_config = layers_config(config.target_config, config.num_layers)
        self.masks = nn.Parameter(torch.randn(config.num_masks, self.layers_config.hidden_size))

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (0,)

    def attach(self, target: PreTrainedModel) -> "PassEmbeddingsDrafter":
        """Borrow the target's layers too: copies without memory of their own, which attend as groups do."""
        super().attach(target)
        with torch.device("meta"):
            layers = build_target_layers(self.layers_config).layers
        for layer, source in zip(layers, target.base_model.layers, strict=True):
            _share_weights(layer, source)
        # In eval mode for good: the target that is drafted for has no dropout.
        self._of_the_target = TargetLayers(layers.eval(), target.base_model.norm)
        return self

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        return self._of_the_target.layers

    @property
    def norm(self) -> nn.Module:  # type: ignore[override]
        return self._of_the_target.norm

    @torch.no_grad()
    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Look-ahead embeddings near the mean of the target's."""
        self.to(torch.promote_types(target.dtype, torch.float32))
        embedding_vd = target.get_input_embeddings()(torch.arange(target.config.vocab_size, device=target.device))
        embedding_vd = embedding_vd.to(self.masks.dtype)
        self.masks.normal_(0.0, embedding_vd.std().item()).add_(embedding_vd.mean(0))

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """[..., D]: what the target reads, in its dtype."""
        return self.attached.embedding(input_ids)

    def mask_inputs(self) -> Tensor:
        """[T, D], in the target's dtype whatever theirs is."""
        return self.masks.to(next(self.attached.embedding.parameters()).dtype)


def _share_weights(copy: nn.Module, source: nn.Module) -> None:
    """Put the source's parameters and buffers, the very objects, into a copy of the same structure.

    The objects rather than their memory: what is later done to the target (a dtype, a device) then holds for both.
    """
    names = {name for name, _ in copy.named_parameters()}
    if names != {name for name, _ in source.named_parameters()}:
        raise ValueError(f"a {type(source).__name__} of the target is not built as its config says")
    modules = dict(source.named_modules())
    for name, module in copy.named_modules():
        module._parameters.update(modules[name]._parameters)
        module._buffers.update(modules[name]._buffers)


DRAFTER = PassEmbeddingsDrafter
