"""Which label and which feature belong to which group: the shifts that training and every drafter share.

Group t is "x_t is the newest committed token". It predicts x_{t+1} (depth 1) to x_{t+G} (depth G). Available then: the
embedding of x_t and the target's feature h_{t-1}, the one that *predicted* x_t; h_t does not exist yet, because the
target has not processed x_t.

Shapes: B batch, S sequence, G depths, F features.
"""

import torch
from torch import Tensor

IGNORED_LABEL = -100


def document_starts(position_ids_bs: Tensor) -> Tensor:
    """[B, S] bool: the first token of each document of packed rows, where position ids do not go on counting.

    The same rule by which transformers keeps packed documents apart in the target's attention.
    """
    first_b1 = torch.ones_like(position_ids_bs[:, :1], dtype=torch.bool)
    return torch.cat([first_b1, position_ids_bs.diff(dim=1) != 1], dim=1)


def previous_features(features_bsf: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """[B, S, F]: h_{t-1} at t, the feature that predicted x_t; zeros for a document's first token."""
    previous_bsf = torch.cat([torch.zeros_like(features_bsf[:, :1]), features_bsf[:, :-1]], dim=1)
    if position_ids is None:
        return previous_bsf
    starts_bs = document_starts(position_ids.expand(features_bsf.shape[:2]))
    return previous_bsf.masked_fill(starts_bs.unsqueeze(-1), 0.0)


def depth_labels(input_ids_bs: Tensor, loss_mask_bs: Tensor, num_depths: int) -> Tensor:
    """[B, G, S]: label of depth j+1 at t is x_{t+1+j} if loss_mask[t+1..t+1+j] are all 1, else -100.

    A run of ones in the mask is one assistant turn, so no label crosses the end of a turn.
    """
    batch, length = input_ids_bs.shape
    labels = input_ids_bs.new_full((batch, num_depths, length), IGNORED_LABEL)
    valid = torch.ones_like(input_ids_bs, dtype=torch.bool)
    for j in range(min(num_depths, length - 1)):
        shift = j + 1
        valid = valid[:, : length - shift] & loss_mask_bs[:, shift:].bool()
        labels[:, j, : length - shift] = torch.where(valid, input_ids_bs[:, shift:], IGNORED_LABEL)
    return labels
