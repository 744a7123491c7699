"""DSpark: DFlash's block, a Markov head over its marginals, and a head that says how sure it is (arXiv 2607.05147).

Shape, training and decoding are those of `dflash.py`, with the published way of reading a block: a row predicts
the token after its own position, the newest token's row the first (`sample_from_anchor`), and a round drafts
`block_size` tokens. The Markov head (`base/draft_vocab.py`) makes the drafts of a depth depend on the token before, so
that trees are grown along paths under an exact q, still from one forward of the layers.

The confidence head says of each drafted token, c_k = sigmoid(w [h_k; W1[x_{k-1}]] + b), how likely it is accepted where
its path was: h_k is the row's final-normed state. It learns alpha_k = sum_v min(p(v), q(v)), the target's and the
drafter's distributions after the true prefix, by binary cross entropy, whose gradient reaches the layers too. Engines
may ask it; our trees do not, as q itself predicts better (`docs/results/drafters/confidence.json`).

The published loss of a token is 0.1 CE + 0.9 L1(p, q) + 1.0 BCE, weighted with exp(-(k-1)/gamma), gamma = 4 for blocks
of 7 (deepseek-ai/DeepSpec, config/dspark; speculators' default is KL in place of the first two). L1 is sum |p_v - q_v|,
twice our TV (SpecForge, specforge/algorithms/common/dflash_family_model.py), so theirs is `loss: {ce: 0.1, tv: 1.8}`.
Here it is `loss`, KL by default, + `confidence_weight` BCE, with `depth_weights` as in `dflash.py`. With a
`draft_vocab_size` p is the target's distribution over the drafted tokens, so that alpha is a little too large: by what
the others would have.

Shapes: N labelled rows, G depths, D hidden, r rank of the Markov head.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from draftsmith.models.base.config import MODEL_TYPE_PREFIX, DrafterConfig
from draftsmith.models.base.options import Loss
from draftsmith.models.drafters.dflash import DFlashConfig, DFlashDrafter, SampleFromAnchor
from draftsmith.models.loss import AuxiliaryLoss, HeadBlock
from draftsmith.recipes.schema import MOST_DEPTHS


class DSparkConfig(DFlashConfig):
    model_type = MODEL_TYPE_PREFIX + "dspark"

    class Options(DFlashConfig.Options):
        """Options of `drafter.kind: dspark`: the keys of `drafter.options` in a recipe."""

        block_size: int = Field(
            5,
            ge=2,
            le=MOST_DEPTHS,
            description="positions in a block, with the newest token's, and number of tokens it drafts (published: 7)",
        )
        sample_from_anchor: SampleFromAnchor = True
        markov_rank: int = Field(
            256,
            ge=1,
            description="rank of the Markov head, which makes a draft token's logits depend on the draft token "
            "before it, at the cost of one product of this width per draft token (256 for a target of 8B)",
        )
        loss: Loss = "kl"
        confidence_weight: float = Field(
            1.0,
            ge=0,
            description="weight of the confidence head's loss, relative to 1 for the loss of the drafts; 0: no "
            "confidence head",
        )


class ConfidenceHead(nn.Module):
    """A linear map of hidden state and previous token, [h; W1[x]], to a logit; it starts at 0, a confidence of 0.5."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, normed: Tensor, token_before: Tensor) -> Tensor:
        """Map normed states [..., D] and W1 of previous tokens [..., r] to logits [...], in fp32 at least."""
        read = torch.cat([normed, token_before.to(normed.dtype)], dim=-1)
        return self.proj(read.to(self.proj.weight.dtype)).squeeze(-1).to(torch.promote_types(read.dtype, torch.float32))


class DSparkDrafter(DFlashDrafter):
    """DSpark's drafter q: DFlash's block with a Markov head, and a confidence head."""

    config_class = DSparkConfig

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        # Not in `build`, after which transformers draws all linear layers again.
        if config.confidence_weight:
            self.needs_acceptance, self.auxiliary_modules = True, ["confidence_head"]
            self.confidence_head = ConfidenceHead(self.layers_config.hidden_size + config.markov_rank)

    def auxiliary_loss(self, block: HeadBlock, features_pd: Tensor | None) -> AuxiliaryLoss | None:
        """Return the confidence head's loss of a block of labelled rows; None without a confidence head."""
        if not self.needs_acceptance:
            return None
        assert block.log_p_mv is not None
        assert block.previous_mr is not None
        sure_m = self.confidence_head(block.hidden_md, block.previous_mr)
        # Rounding may leave a sum of probabilities above 1.
        acceptance_m = torch.minimum(block.log_p_mv, block.log_q_mv.detach()).exp().sum(-1).clamp(max=1)
        losses_m = F.binary_cross_entropy_with_logits(sure_m, acceptance_m, reduction="none")
        return AuxiliaryLoss(self.config.confidence_weight * losses_m, block.rows.weight_m)


DRAFTER = DSparkDrafter
