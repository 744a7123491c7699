"""The loss of a step from rows alone, without a drafter: what `training_loss` makes of any hidden states and labels."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.base.draft_head import Batch, DraftHead, LabelledRows, training_loss
from draftsmith.models.losses import DrafterOutput, LowRankLogits


def loss_of_rows(
    hidden_nd: Tensor,
    depth_n: Tensor,
    labels_n: Tensor,
    head: nn.Linear,
    shares: list[float],
    loss: str = "ce",
    teacher_nd: Tensor | None = None,
    teacher_head: nn.Linear | None = None,
    teacher_columns: Tensor | None = None,
    low_rank: LowRankLogits | None = None,
) -> DrafterOutput:
    """Every row is of a group of its own; a negative label is one that the head does not have."""
    num_rows, num_depths = len(depth_n), len(shares)
    token_n = num_depths * torch.arange(num_rows)
    labels_bgs = torch.full((1, num_depths, max(1, num_rows * num_depths)), -100)
    labels_bgs[0, depth_n, token_n] = labels_n
    features_bsd = None
    if teacher_nd is not None:
        features_bsd = teacher_nd.new_zeros(1, labels_bgs.shape[2], teacher_nd.shape[1])
        features_bsd[0, token_n + depth_n] = teacher_nd
    drafter: Any = SimpleNamespace(
        config=SimpleNamespace(options=SimpleNamespace(dpace=None)),
        depth_shares=shares,
        class_weight=1.0,
        wants_overlap=False,
        further_losses=lambda part: None,
    )
    markov: Any = None if low_rank is None else SimpleNamespace(factors=lambda previous_n: low_rank)
    draft_head = DraftHead(head, loss, teacher_head or head, teacher_columns, None, markov)
    batch = Batch(labels_bgs[:, 0], labels_bgs, features_bsd, None)
    return training_loss(drafter, batch, [LabelledRows(draft_head, hidden_nd, depth_n, token_n)])
