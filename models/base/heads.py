"""Drafters with a head for each depth, which reads one state of the target and no others: Medusa and Hydra.

Shapes: B batch, S sequence, G heads = depths, N labelled rows of a depth, D hidden, V' drafted tokens.
"""

from collections.abc import Callable
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.draft_vocabulary import DraftVocabulary
from draftsmith.models.base.drafter import DrafterConfig
from draftsmith.models.base.options import DepthOptions, DraftVocabSize, Loss
from draftsmith.models.groups.alignment import IGNORED_LABEL
from draftsmith.models.losses import DrafterOutput
from draftsmith.recipes.errors import UserError


class HeadOptions(DepthOptions):
    """Of both."""

    num_heads: int = Field(5, ge=1, description="G, the depths that are drafted")
    num_layers: int = Field(1, ge=1, description="residual blocks of a head")
    lm_heads: Literal["separate", "shared"] = Field(
        "separate",
        description="an LM head for each head, which starts as the target's (both papers); or the target's frozen one "
        "for all, which leaves only the blocks to train",
    )
    loss: Loss = "ce"
    draft_vocab_size: DraftVocabSize = None

    @property
    def num_depths(self) -> int:
        return self.num_heads


class HeadsDrafter(DraftVocabulary):
    """LM heads, shared or not, and the loss through them. Own ones have V' rows each, with `draft_vocab_size`."""

    def add_lm_heads(self, config: DrafterConfig) -> None:
        """Make them, if they are not the target's."""
        if config.lm_heads == "separate":
            hidden_size, vocabulary = (config.target_config[key] for key in ("hidden_size", "vocab_size"))
            rows = config.draft_vocab_size or vocabulary
            bias = getattr(config, "lm_head_bias", False)
            self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, rows, bias=bias) for _ in range(config.num_heads))
            for head in self.own_heads if bias else []:
                head.bias.requires_grad_(False).zero_()

    @property
    def own_heads(self) -> list[nn.Linear]:
        return [cast(nn.Linear, head) for head in self.lm_heads] if self.config.lm_heads == "separate" else []

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """LM heads start as the target's own.

        Raises:
            UserError: That has a bias, which LM heads of our own do not have.
        """
        if self.config.lm_heads == "separate":
            source = target.get_output_embeddings()
            if source.bias is not None:
                raise UserError(
                    f"the LM head of {type(target).__name__} has a bias, so LM heads of the drafter's own cannot start "
                    "as it: use drafter.options.lm_heads=shared"
                )
            self.initialize_own_heads()

    def loss_of_heads(
        self,
        labels_bgs: Tensor,
        features: Tensor,
        hidden_of: Callable[[int, Tensor, Tensor], Tensor],
        counts_2g: Tensor | None = None,
    ) -> DrafterOutput:
        """The mean of each depth's row losses, these weighted with `depth_weights`.

        Args:
            labels_bgs: [B, G, S], -100 where there is none.
            features: [B, S, D] that the target's LM head reads, AT each token: the teacher's, where the loss has one.
            hidden_of: Head index j, and batch and position [N] of the rows, to their hidden states [N, D].
            counts_2g: The whole batch's `label_counts`.
        """
        results = []
        correct_bgs = torch.zeros_like(labels_bgs, dtype=torch.bool)
        for j, weight in enumerate(self.depth_shares):
            batch_n, position_n = (labels_bgs[:, j] != IGNORED_LABEL).nonzero(as_tuple=True)
            hidden_nd, labels_n = hidden_of(j, batch_n, position_n), labels_bgs[batch_n, j, position_n]
            teacher_nd = features[batch_n, position_n + j]  # h_{t+j} predicts x_{t+1+j}
            only_depth_n = torch.zeros_like(labels_n)
            head = self.draft_head(j)
            counts_1 = None if counts_2g is None else counts_2g[1, j : j + 1]
            results.append(self.loss_of_rows(hidden_nd, only_depth_n, labels_n, teacher_nd, [weight], counts_1, head))
            correct_bgs[batch_n, j, position_n] = cast(Tensor, results[-1].correct_n)
        loss_g, *sums = (
            torch.stack([result[key].squeeze() for result in results])
            for key in ("loss", "depth_loss_sum", "depth_correct", "depth_count")
        )
        return DrafterOutput(loss_g.sum(), *sums, correct_bgs=correct_bgs)
