"""Weights of rows in the loss of a training step, by depth and by the drafter's success in their group.

`depth_weights` gives each depth its share of the loss, a mean over the depth's own rows.

`dpace_alpha` is D-PACE (dynamic position-aware cross entropy, arXiv 2605.18810), which weighs every row by what it is
worth to the drafted length of its group. With q_i the drafter's probability of the label at depth i,
sum_m prod_{i<=m} q_i is the length that is expected to be accepted, and its gradient is that of sum_j w_j log q_j with

    w_j = sum_{m>=j} prod_{i<=m} q_i      (eq. 8; q_i there is (1 - alpha) q_i + alpha, eq. 7; w_j carries no gradient)

so that the loss of a group is sum_j w_j * (-log q_j) (eq. 9). The weights are not divided by their sum, which would
take the expected length out of it again; over groups we take a mean, as the paper's author proposes
(sgl-project/SpecForge, issue 828; his own code, Lucas-TY/D-PACE, divides by the batch's sequences). Where we decide:
w_j weighs the row's loss whatever that is (KL, TV and LK as in SpecForge, pull request 848; also EAGLE's regression), q
being the label's probability all the same; a token outside the draft vocabulary has q = 0; a row that a conditional
drop leaves out ends its group.

`until_first_error`, with `depth_weights` or with D-PACE, leaves out the losses after the first wrong row of a group
(accept-until-fail training, 2607.01893): a draft is accepted up to its first row whose most likely token is not the
label.

Shapes: P = B*S tokens = groups, G depths, M labelled rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.models.groups.layout import Groups
from draftsmith.models.loss import DrafterOutput, HeadLoss, safe_denominator


def weigh_by_depth(shares_g: Tensor, depth_m: Tensor, mask_m: Tensor, counts_g: Tensor | None) -> Tensor:
    """Return weights [M]: the depth's share over the number of its rows, 0 where the mask is 0.

    Args:
        shares_g: [G] of the options' `depth_shares`.
        depth_m: [M] from 0.
        mask_m: [M] 1 for the rows that count.
        counts_g: [G] rows of each depth in the whole batch; by default these are all.
    """
    counts_g = torch.zeros_like(shares_g).index_add(0, depth_m, mask_m) if counts_g is None else counts_g
    return (shares_g / safe_denominator(counts_g.to(shares_g.dtype)))[depth_m] * mask_m


@dataclass(frozen=True)
class HeadRows:
    """The M labelled rows that an LM head reads, and their losses through it.

    Args:
        place_m: Places of the rows among the N.
        depth_m, before_m: The depth of each row, and the place of the token before its label, see `Groups.labels`.
        tokens_m: These tokens.
        rows_m: The labels' rows of the head, see `DraftVocab.rows_of`.
        mask_m: 1 for the rows with loss, see `DraftVocab.mask_of`.
        weights_m: Of the rows' losses, by depth.
        linear: The head.
        normed_md: Its inputs.
    """

    place_m: Tensor
    depth_m: Tensor
    before_m: Tensor
    tokens_m: Tensor
    rows_m: Tensor
    mask_m: Tensor
    weights_m: Tensor
    linear: nn.Linear
    normed_md: Tensor
    result: HeadLoss


# An auxiliary loss: losses [M]; 1 for the rows that count [M], which are those that the loss through the head reads, or
# None for all; bool [M] whether the label is drafted, None for whether it is the head's argmax.
Auxiliary = tuple[Tensor, Tensor | None, Tensor | None]
# D-PACE's alpha, and whether a group counts up to its first error only.
Credit = tuple[float | None, bool]


def sum_losses(
    groups: Groups,
    heads: Sequence[tuple[HeadRows, Auxiliary | None]],
    weight: float,
    shares_g: Tensor,
    counts_2g: Tensor | None,
    credit: Credit | None,
) -> DrafterOutput:
    """Return the loss of a step and its sums by depth, over all heads: the one place where rows are weighed.

    Args:
        groups: Groups of the step.
        heads: The rows of each LM head, and their auxiliary loss.
        weight: Weight of the losses through heads, relative to 1 for the auxiliary losses.
        shares_g: [G] of the options' `depth_shares`.
        counts_2g: `Drafter.label_counts` of the whole batch; by default these groups are all of it.
        credit: How rows are weighted by their group, if at all.
    """
    batch, num_depths, length = groups.labels_bgs.shape
    losses, terms = list[Tensor](), list[tuple[Tensor, Tensor, Tensor]]()
    depths, slots, nats, correct = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    for rows, auxiliary in heads:
        result = rows.result
        depths.append(rows.depth_m)
        slots.append(groups.token_n[rows.place_m] * num_depths + rows.depth_m)
        nats.append(result.cross_entropy_n.masked_fill(rows.rows_m < 0, float("inf")))
        correct.append(result.correct_n)
        losses.append(weight * result.loss)
        terms.append((slots[-1], weight * result.losses_n, rows.weights_m))
        if auxiliary is not None:
            losses_m, mask_m, drafted_m = auxiliary
            correct[-1] = result.correct_n if drafted_m is None else drafted_m
            counts_g = None if counts_2g is None else counts_2g[int(mask_m is not None)]
            mask_m = torch.ones_like(losses_m) if mask_m is None else mask_m
            terms.append((slots[-1], losses_m, weigh_by_depth(shares_g, rows.depth_m, mask_m, counts_g)))
            losses.append((losses_m * terms[-1][2]).sum())
    depth_m, slot_m, nats_m, correct_m = (torch.cat(part) for part in (depths, slots, nats, correct))
    if credit is not None:
        num_groups = None if counts_2g is None else counts_2g[0, 0]
        dpace_q, reached_q = weigh_by_groups(credit, slot_m, nats_m, correct_m, batch * length, num_depths, num_groups)
        losses = []
        for slot, losses_m, weights_m in terms:
            weights_m = weights_m if dpace_q is None else dpace_q[slot]
            losses.append((losses_m * (weights_m if reached_q is None else weights_m * reached_q[slot])).sum())
    zeros_g = torch.zeros_like(shares_g)
    correct_bsg = torch.zeros(batch * length * num_depths, dtype=torch.bool, device=slot_m.device)
    return DrafterOutput(
        torch.stack(losses).sum(),
        zeros_g.index_add(0, depth_m, nats_m.masked_fill(nats_m.isinf(), 0.0)),
        zeros_g.index_add(0, depth_m, correct_m.to(zeros_g.dtype)),
        torch.zeros_like(zeros_g, dtype=depth_m.dtype).index_add(0, depth_m, torch.ones_like(depth_m)),
        correct_bsg.index_copy(0, slot_m, correct_m).view(batch, length, num_depths).transpose(1, 2),
    )


def weigh_by_groups(
    credit: Credit,
    slot_m: Tensor,
    nats_m: Tensor,
    correct_m: Tensor,
    num_groups: int,
    num_depths: int,
    counted_groups: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the row weights that depend on a group's earlier rows, [P * G] each; None for a rule that is switched off.

    Args:
        credit: Rules that are switched on.
        slot_m: For each labelled row the number of its group times G, plus its depth.
        nats_m: -log q(label) of each row, inf for a label outside the draft vocabulary.
        correct_m: Whether the drafter's most likely token is the label.
        counted_groups: [] groups with a label in the whole batch; by default these are all.

    Returns:
        D-PACE's weights, in place of those by depth; and 1 up to the first error of a group, 0 after it.
    """
    dpace_alpha, until_first_error = credit
    dpace_q = reached_q = None
    if dpace_alpha is not None:
        if counted_groups is None:
            counted_groups = (slot_m % num_depths == 0).sum()
        lengths_pg = group_lengths(dpace_alpha, nats_m, slot_m, num_groups, num_depths)
        dpace_q = (lengths_pg / safe_denominator(counted_groups.to(lengths_pg.dtype))).flatten()
    if until_first_error:
        correct_q = torch.zeros(num_groups * num_depths, dtype=nats_m.dtype, device=slot_m.device)
        correct_pg = correct_q.index_copy(0, slot_m, correct_m.to(nats_m.dtype)).view(num_groups, num_depths)
        reached_q = torch.cat([torch.ones_like(correct_pg[:, :1]), correct_pg[:, :-1]], dim=1).cumprod(1).flatten()
    return dpace_q, reached_q


def group_lengths(alpha: float, cross_entropy_n: Tensor, slot_n: Tensor, num_groups: int, num_depths: int) -> Tensor:
    """Return D-PACE's w [P, G] of the rows of whole groups, 0 without a row.

    Args:
        alpha: The smoothing, in [0, 1]; with 1 the weights are G, G-1, ... 1.
        cross_entropy_n: -log q(label) of each row.
        slot_n: For each row the number of its group, from 0, times G, plus its depth. A group's depths have no gaps.
    """
    size = num_groups * num_depths
    confidence_n = (1.0 - alpha) * (-cross_entropy_n.detach()).exp() + alpha
    factors_pg = confidence_n.new_ones(size).index_copy(0, slot_n, confidence_n).view(num_groups, num_depths)
    has_row_pg = confidence_n.new_zeros(size).index_fill(0, slot_n, 1.0).view(num_groups, num_depths)
    reached_pg = factors_pg.cumprod(1) * has_row_pg
    return reached_pg.flip(1).cumsum(1).flip(1) * has_row_pg
