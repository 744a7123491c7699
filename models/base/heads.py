"""Drafters with a head for each depth, which reads one state of the target and no others: Medusa and Hydra.

Shapes: B batch, S sequence, P = B*S tokens, G heads = depths, N labelled rows of a depth, D hidden, V' drafted tokens.
"""

from collections.abc import Callable
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.depth_weights import DpaceWeights, weighed
from draftsmith.models.base.draft_vocabulary import DraftVocabulary
from draftsmith.models.base.drafter import DrafterConfig
from draftsmith.models.base.options import DepthOptions, DraftVocabSize, Loss
from draftsmith.models.groups.rows import GroupRows
from draftsmith.models.head_loss import TeacherRows
from draftsmith.models.losses import TEACHER_LOSSES, DrafterOutput
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
        rows: GroupRows,
        features: Tensor,
        hidden_of: Callable[[int, Tensor], Tensor],
        counts_2g: Tensor | None = None,
    ) -> DrafterOutput:
        """The mean of each depth's row losses, these weighted with `depth_weights`.

        Args:
            labels_bgs: [B, G, S], -100 where there is none.
            rows: That matter of these labels.
            features: [B, S, D] that the target's LM head reads, AT each token: the teacher's, where the loss has one.
            hidden_of: Head index j, and the places [N] of its rows' newest tokens among all B*S, to the rows' hidden
                states [N, D].
            counts_2g: The whole batch's `label_counts`.
        """
        results, groups = list[DrafterOutput](), list[Tensor]()
        alpha = self.config.options.dpace
        correct = torch.zeros_like(labels_bgs, dtype=torch.bool).flatten()
        labels, features_pd = labels_bgs.flatten(), features.flatten(0, 1)
        for j, (weight, place_n) in enumerate(zip(self.depth_shares, rows.labelled_streams(), strict=True)):
            token_n, index_n = rows.token_n[place_n], rows.index_n[place_n]
            hidden_nd, labels_n = hidden_of(j, token_n), labels[index_n]
            teacher = None
            if self.config.loss in TEACHER_LOSSES:
                teacher = TeacherRows(features_pd, token_n + j)  # h_{t+j} predicts x_{t+1+j}
            only_depth_n = torch.zeros_like(labels_n)
            head = self.draft_head(j)
            counts_1 = None if counts_2g is None else counts_2g[1, j : j + 1]
            given = (hidden_nd, only_depth_n, labels_n, teacher, [weight], counts_1, head)
            results.append(self.loss_of_rows(*given, summed=alpha is None))
            groups.append(token_n)
            correct[index_n] = cast(Tensor, results[-1].correct_n)
        if alpha is not None:
            results = self._weighed(results, groups, alpha, labels_bgs, counts_2g)
        loss_g, *sums = (
            torch.stack([result[key].squeeze() for result in results])
            for key in ("loss", "depth_loss_sum", "depth_correct", "depth_count")
        )
        return DrafterOutput(loss_g.sum(), *sums, correct_bgs=correct.view(labels_bgs.shape))

    @staticmethod
    def _weighed(
        results: list[DrafterOutput], groups: list[Tensor], alpha: float, labels_bgs: Tensor, counts_2g: Tensor | None
    ) -> list[DrafterOutput]:
        """Losses of all depths by D-PACE, given the depths' rows and the groups that these are of."""
        batch, num_depths, length = labels_bgs.shape
        sizes = [len(group_n) for group_n in groups]
        depth_n = torch.cat([torch.full_like(group_n, depth) for depth, group_n in enumerate(groups)])
        cross_entropy_n = torch.cat([cast(Tensor, result.cross_entropy_n) for result in results])
        weights_n = DpaceWeights(alpha, batch * length, num_depths).of(cross_entropy_n, torch.cat(groups), depth_n)
        total = (depth_n == 0).sum() if counts_2g is None else counts_2g[0, 0]
        return [weighed(*pair, total) for pair in zip(results, weights_n.split(sizes), strict=True)]
