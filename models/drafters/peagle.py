"""P-EAGLE: parallel drafting in EAGLE-3's shape (arXiv 2602.01469), which vLLM serves with `parallel_drafting`.

Group-wise training and decoding are those of `group_wise.py`, the layers EAGLE-3's (`eagle3.py`).
Row 0 of a group reads [e(x_t); fc(h_{t-1})], h being the residual streams of three layers of the target. [MASK]_1..K
all read the same [e(mask token); fc(mask_hidden)] and differ only in their position, t+1..t+K. `mask_hidden` [1, F] is
trained; the mask token's embedding is the target's and stays as it is. `keep_ratio` is the paper's conditional drop.
`markov_rank` is not in it, nor in vLLM.

Where we differ: the paper's code (vllm-project/speculators, src/speculators/models/peagle/) also trains a copy of the
embedding table and drops by default, `keep_ratio: 0.7, keep_ratio_min: 0.2` (data.py), where we keep all; depth weights
are 0.8**j, not all equal. What dropping and equal weights cost on the embedded target stands in docs/guides/serving.md.

Shapes: K masks, D hidden, E = 2D input width of the first layer, F features.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.group_wise import MaskOptions, MaskTokenId
from draftsmith.models.base.options import NumLayers
from draftsmith.models.drafters.eagle3 import Eagle3Shape, Eagle3ShapeConfig, Eagle3ShapeOptions


class PEagleConfig(Eagle3ShapeConfig):
    model_type = MODEL_TYPE_PREFIX + "peagle"

    class Options(Eagle3ShapeOptions, MaskOptions):
        """Options of `drafter.kind: peagle`: the keys of `drafter.options` in a recipe."""

        num_layers: NumLayers = 2  # the masks read the newest token by attention alone: one layer learns that slowly
        mask_token_id: MaskTokenId = Field(None, validate_default=True)


class PEagleDrafter(Eagle3Shape):
    """P-EAGLE's drafter q: EAGLE-3's layers with K equal [MASK]s, which draft in one forward."""

    config_class = PEagleConfig

    def build(self, config: DrafterConfig) -> None:
        super().build(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, self.fc.in_features))

    def mask_inputs(self) -> Tensor:
        """Return the masks' layer inputs [K, E]: the same input for each of the K masks."""
        mask_id = torch.full((1,), self.config.mask_token_id, device=self.mask_hidden.device)
        return self.real_inputs(mask_id, self.mask_hidden).expand(self.config.num_masks, -1)


DRAFTER = PEagleDrafter
