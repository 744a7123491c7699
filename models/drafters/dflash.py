"""DFlash: a block of masks, denoised in one forward before a context of the target's features (arXiv 2602.06036).

Shape, training and decoding are those of `base/blocks.py`: a block is the newest token and `block_size` - 1 masks, the
row of a mask predicts the token at its own position, and a round drafts `block_size` - 1 tokens. Names and layout are
the published ones, which vLLM and SGLang load.

The published loss of a block is cross entropy weighted with exp(-(k-1)/gamma) for the k-th drafted token, gamma = 4, 5
and 7 for blocks of 8, 10 and 16: `depth_weights`, whose powers they are, is exp(-1/gamma), 0.78, 0.82 or 0.87.

Where we decide or differ: each depth's loss is a mean over its own labels and the weights are normalised; every
labelled position is an anchor, not 512 of a sequence (`anchor_ratio`), and also the position before an answer, whose
token carries no loss itself; layers start from the target's last ones (`init`), where the published start at random;
and all losses of the project are there. `first_token` has no counterpart: no engine has a row for it either.

Shapes: F features.
"""

from draftsmith.models.base.blocks import BlockDrafter, BlockOptions
from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX, DrafterConfig, Loss


class DFlashConfig(DrafterConfig):
    model_type = MODEL_TYPE_PREFIX + "dflash"

    class Options(BlockOptions):
        """The keys of `drafter.options` in a recipe."""

        loss: Loss = "ce"


class DFlashDrafter(BlockDrafter):
    """The drafter q; see the module's docstring."""

    config_class = DFlashConfig


DRAFTER = DFlashDrafter
