"""P-EAGLE: parallel drafting in EAGLE-3's shape (arXiv 2602.01469), which vLLM serves with `parallel_drafting`.

Group-wise training and decoding are the parallel drafter's (`parallel.py`), the layers EAGLE-3's (`eagle3_shape.py`).
Row 0 of a group reads [e(x_t); fc(h_{t-1})], h being the residual streams of three layers of the target. [MASK]_1..K
all read the same [e(mask token); fc(mask_hidden)] and differ only in their position, t+1..t+K. `mask_hidden` [1, F] is
trained; the mask token's embedding is the target's and stays as it is. `keep_ratio` is the paper's conditional drop.

Where we differ: the paper's code (vllm-project/speculators, src/speculators/models/peagle/) also trains a copy of the
embedding table and drops by default (r = 0.7), down to a floor of 0.2 of the positions (data.py), while our
`keep_ratio` is 1 and has no floor; depth weights are 0.8**j, not all equal. Neither is measured here.

Shapes: K masks, D hidden, E = 2D input width of the first layer, F features.
"""

from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX
from draftsmith.models.base.eagle3_shape import Eagle3Shape, Eagle3ShapeConfig
from draftsmith.models.drafters.parallel import ParallelDrafterConfig
from draftsmith.recipes.errors import UserError


class PEagleConfig(Eagle3ShapeConfig):
    """Options of P-EAGLE, the keys of `drafter.options` in a recipe.

    Args:
        num_masks: K; a round drafts K+1 tokens.
        num_layers: Decoder layers; the first is EAGLE-3's, the further ones are plain.
        mask_token_id: The token that every [MASK] reads, best one that no text has; by default the target's padding
            token, or the last one of its vocabulary.
        feature_layers: Layers of the target whose residual streams are fused.
        draft_vocab_size: Draft this many of the most frequent tokens only.
        attention: Training backend: `folded`, `dense` or `flex`.
        loss: A name in `losses.LOSSES`; `ce` needs no teacher.
        depth_weights: One number d for weights d**j, or one weight a depth.
        keep_ratio: Train [MASK]_j at a random keep_ratio**j of its positions; 1 keeps all.
        init: Start the layers and the norm from the target's last ones (`target`) or at random (`random`).
    """

    model_type = MODEL_TYPE_PREFIX + "peagle"

    def __init__(
        self,
        target_config: dict[str, Any] | None = None,
        target_name_or_path: str = "",
        num_masks: int = 4,
        num_layers: int = 1,
        mask_token_id: int | None = None,
        feature_layers: list[int] | None = None,
        draft_vocab_size: int | None = None,
        attention: str = "folded",
        loss: str = "kl",
        depth_weights: float | list[float] = 0.8,
        keep_ratio: float = 1.0,
        init: str = "target",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            target_config,
            target_name_or_path,
            feature_layers,
            draft_vocab_size,
            num_masks=num_masks,
            num_layers=num_layers,
            attention=attention,
            loss=loss,
            depth_weights=depth_weights,
            keep_ratio=keep_ratio,
            init=init,
            **kwargs,
        )
        self.mask_token_id = self._default_mask() if mask_token_id is None else mask_token_id
        vocabulary = self.target_config.get("vocab_size", 1)
        if not isinstance(self.mask_token_id, int) or not 0 <= self.mask_token_id < vocabulary:
            raise UserError(
                f"key `drafter.options.mask_token_id` must be a token id from 0 to {vocabulary - 1}, "
                f"not {mask_token_id!r}"
            )

    def _default_mask(self) -> int:
        padding = self.target_config.get("pad_token_id")
        last = self.target_config.get("vocab_size", 1) - 1
        return padding if padding is not None and 0 <= padding <= last else last


class PEagleDrafter(Eagle3Shape):
    """The drafter q; see the module's docstring."""

    config_class = PEagleConfig

    def build(self, config: ParallelDrafterConfig) -> None:
        super().build(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, self.fc.in_features))

    def mask_inputs(self) -> Tensor:
        """[K, E], the same row K times."""
        mask_id = torch.tensor([self.config.mask_token_id], device=self.mask_hidden.device)
        return self.real_inputs(mask_id, self.mask_hidden).expand(self.config.num_masks, -1)


DRAFTER = PEagleDrafter
