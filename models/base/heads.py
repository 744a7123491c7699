"""Drafters with a head for each depth, which reads one state of the target and no others: Medusa and Hydra.

Shapes: B batch, S sequence, G heads = depths, N labelled rows of a depth, D hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter, DrafterConfig
from draftsmith.models.base.options import DepthOptions, Loss
from draftsmith.models.groups.alignment import IGNORED_LABEL
from draftsmith.models.losses import DrafterOutput, head_loss
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

    @property
    def num_depths(self) -> int:
        return self.num_heads


class HeadsDrafter(Drafter):
    """LM heads, shared or not, and the loss through them."""

    def add_lm_heads(self, config: DrafterConfig) -> None:
        """Make them, if they are not the target's."""
        if config.lm_heads == "separate":
            hidden_size, vocabulary = (config.target_config[key] for key in ("hidden_size", "vocab_size"))
            own_heads = (nn.Linear(hidden_size, vocabulary, bias=False) for _ in range(config.num_heads))
            self.lm_heads = nn.ModuleList(own_heads)

    def lm_head_of(self, j: int) -> nn.Module:
        """The linear layer [V, D] for depth j+1."""
        return self.lm_heads[j] if self.config.lm_heads == "separate" else self.attached.lm_head

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
            for parameter in self.lm_heads.parameters():
                parameter.copy_(source.weight)

    def loss_of_heads(
        self, labels_bgs: Tensor, features: Tensor, hidden_of: Callable[[int, Tensor, Tensor], Tensor]
    ) -> DrafterOutput:
        """The mean of each depth's row losses, these weighted with `depth_weights`.

        Args:
            labels_bgs: [B, G, S], -100 where there is none.
            features: [B, S, D] that the target's LM head reads, AT each token: the teacher's, where the loss has one.
            hidden_of: Head index j, and batch and position [N] of the rows, to their hidden states [N, D].
        """
        weights_dtype, results = torch.promote_types(self.dtype, torch.float32), []
        correct_bgs = torch.zeros_like(labels_bgs, dtype=torch.bool)
        for j, weight in enumerate(self.depth_shares):
            batch_n, position_n = (labels_bgs[:, j] != IGNORED_LABEL).nonzero(as_tuple=True)
            result = head_loss(
                hidden_of(j, batch_n, position_n),
                self.lm_head_of(j),
                labels_bgs[batch_n, j, position_n],
                torch.full_like(batch_n, weight / max(len(batch_n), 1), dtype=weights_dtype),
                loss=self.config.loss,
                teacher_nd=features[batch_n, position_n + j],  # h_{t+j} predicts x_{t+1+j}
                teacher_head=self.attached.lm_head,
            )
            results.append(result)
            correct_bgs[batch_n, j, position_n] = result.correct_n
        return DrafterOutput(
            loss=torch.stack([result.loss for result in results]).sum(),
            depth_loss_sum=torch.stack([result.cross_entropy_n.sum() for result in results]),
            depth_correct=torch.stack([result.correct_n.sum() for result in results]),
            depth_count=torch.tensor([len(result.losses_n) for result in results], device=features.device),
            correct_bgs=correct_bgs,
        )
