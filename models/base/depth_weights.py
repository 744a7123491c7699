"""How much each depth counts in a drafter's loss, and when: `depth_weights`, `depth_ramp` and `dpace_alpha`.

With equal weights from the first step on, the easy part of the deep depths (their marginals) drowns the hard part of
the first one (copying), which forms late. With a ramp training begins with depth 1 alone and lets the others in one
after the other. It is a function of progress alone, so a run that goes on from a checkpoint goes on in it.

D-PACE (dynamic position-aware cross entropy, arXiv 2605.18810) weighs every row by what it is worth to the drafted
length of its own group. With q_i the drafter's probability of the label at depth i, sum_m prod_{i<=m} q_i is the length
that is expected to be accepted, and its gradient is that of sum_j w_j log q_j with

    w_j = sum_{m>=j} prod_{i<=m} q_i      (eq. 8; q_i there is (1 - alpha) q_i + alpha, eq. 7; w_j carries no gradient)

so that the loss of a group is sum_j w_j * (-log q_j) (eq. 9). A depth counts as far as those above it are right, and
for all that lie below it; deeper ones come in by themselves. The weights are not divided by their sum, which would take
the expected length out of it again; over groups we take a mean, as the paper's author asks for (sgl-project/SpecForge,
issue 828; his own code, Lucas-TY/D-PACE, divides by the batch's sequences). The paper's alpha is 0.5.

With `loss: ce` it is the paper's. Where we decide: w_j weighs the row's loss whatever that is (KL, TV and LK as in
SpecForge, pull request 848; also EAGLE's regression), q being the label's probability all the same; a token outside the
draft vocabulary has q = 0; a row that a conditional drop leaves out ends its group.

Shapes: N labelled rows, P groups, one a token of the batch, G depths.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from draftsmith.models.head_loss import LowRankLogits, TeacherRows, head_loss
from draftsmith.models.losses import DrafterOutput, numbers_beside, one_for_none


def depth_shares(weights: Sequence[float], ramp_frac: float = 0.0, progress_frac: float = 1.0) -> list[float]:
    """Share of each depth in the loss, sum 1: lambda_j s**j, normalised, s rising linearly from 0 to 1.

    With lambda_j = d**j this is (d s)**j: the decay itself goes from 0 to d.

    Args:
        weights: lambda_j > 0 of each depth, from the first (j = 0).
        ramp_frac: Share of the training in which s reaches 1; 0 for s = 1 throughout.
        progress_frac: Share of the optimiser steps that are done.
    """
    s = 1.0 if progress_frac >= ramp_frac else progress_frac / ramp_frac
    ramped = [weight * s**j for j, weight in enumerate(weights)]
    return [weight / sum(ramped) for weight in ramped]


def depth_loss(
    hidden_nd: Tensor,
    depth_n: Tensor,
    labels_n: Tensor,
    head: nn.Module,
    depth_weights_g: Tensor | Sequence[float],
    loss: str = "ce",
    teacher: TeacherRows | None = None,
    teacher_head: nn.Module | None = None,
    teacher_columns: Tensor | None = None,
    counts_g: Tensor | None = None,
    low_rank: LowRankLogits | None = None,
    summed: bool = True,
    overlap: bool = False,
) -> DrafterOutput:
    """A drafter's training loss: the mean over each depth's rows, these weighted with `depth_weights_g`.

    Args:
        depth_n: [N] depth of each row, counted from 0.
        labels_n: [N] rows of the head, or a negative number for a token that a reduced head does not have: `ce` then
            ignores the row, the other losses use its teacher; it counts as wrong, with no cross entropy.
        depth_weights_g: [G], sum 1. A depth without rows adds nothing.
        counts_g: [G] what each depth's sum is divided by, where the rows are part of a larger batch: its rows, of which
            those with an ignored label are none. The rows here by default.
        summed: Whether there is a loss; otherwise `losses_n` carry the gradient, for weights that depend on the rows.
        overlap: Whether every row's alpha is wanted too.

    The others are those of `head_loss`.
    """
    weight_g = numbers_beside(hidden_nd, depth_weights_g)
    zeros_g = torch.zeros_like(weight_g)
    known_n = (labels_n >= 0).to(weight_g.dtype)
    counts_n = known_n if loss == "ce" else torch.ones_like(known_n)
    rows_g = zeros_g.index_add(0, depth_n, counts_n) if counts_g is None else counts_g.to(weight_g.dtype)
    weights_n = (weight_g / one_for_none(rows_g))[depth_n] * counts_n
    labels_n = labels_n.clamp(min=0)
    given, taught = weights_n if summed else None, (teacher, teacher_head, teacher_columns)
    overlap_n = torch.zeros_like(weights_n) if overlap else None
    result = head_loss(hidden_nd, head, labels_n, given, loss, *taught, low_rank, overlap_n)
    return DrafterOutput(
        loss=result.loss if summed else None,
        losses_n=None if summed else result.losses_n * counts_n,
        cross_entropy_n=None if summed else result.cross_entropy_n.masked_fill(known_n == 0, float("inf")),
        depth_loss_sum=zeros_g.index_add(0, depth_n, result.cross_entropy_n * known_n),
        depth_correct=zeros_g.index_add(0, depth_n, result.correct_n * known_n),
        depth_count=torch.zeros_like(weight_g, dtype=depth_n.dtype).index_add(0, depth_n, torch.ones_like(depth_n)),
        correct_n=result.correct_n & (known_n > 0),
        overlap_n=overlap_n,
    )


class DpaceWeights:
    """D-PACE's weights of a step's rows, which come all at once, or depth 1 of all groups first and deeper rows after.

    Args:
        alpha: The smoothing, in (0, 1]; with 1 the weights are G, G-1, ... 1.
        num_groups: P.
        num_depths: G.
    """

    def __init__(self, alpha: float, num_groups: int, num_depths: int) -> None:
        self._alpha, self._shape = alpha, (num_groups, num_depths)
        self._first_p: Tensor | None = None  # smoothed confidence at depth 1, where that came alone
        self._below_p: Tensor | None = None  # the weight of depth 2

    def smoothed(self, cross_entropy_n: Tensor) -> Tensor:
        """(1 - alpha) q + alpha of each row."""
        return (1.0 - self._alpha) * (-cross_entropy_n.detach()).exp() + self._alpha

    def of(self, cross_entropy_n: Tensor, group_n: Tensor, depth_n: Tensor) -> Tensor:
        """[N] w of rows of whole groups.

        Args:
            cross_entropy_n: -log q of the label.
            group_n: Number of each row's group, from 0.
            depth_n: Depth of each row, from 0. A group's depths have no gaps.
        """
        place_n, size = group_n * self._shape[1] + depth_n, self._shape[0] * self._shape[1]
        confidence_n = self.smoothed(cross_entropy_n)
        factors_pg = confidence_n.new_ones(size).index_copy(0, place_n, confidence_n).view(self._shape)
        there_pg = confidence_n.new_zeros(size).index_fill(0, place_n, 1.0).view(self._shape)
        reached_pg = factors_pg.cumprod(1) * there_pg
        return reached_pg.flip(1).cumsum(1).flip(1).flatten().index_select(0, place_n)

    def begin(self, cross_entropy_n: Tensor, group_n: Tensor) -> None:
        """Depth 1 of all groups; `deeper` rows follow, then `first`."""
        confidence_n = self.smoothed(cross_entropy_n)
        self._first_p = confidence_n.new_zeros(self._shape[0]).index_copy(0, group_n, confidence_n)
        self._below_p = torch.zeros_like(self._first_p)

    def deeper(self, cross_entropy_n: Tensor, group_n: Tensor, depth_n: Tensor) -> Tensor:
        """[N] w of all rows but the first ones of some groups."""
        first_p, below_p = cast(Tensor, self._first_p), cast(Tensor, self._below_p)
        # A product with depth 1's factor is all that they miss.
        weights_n = self.of(cross_entropy_n, group_n, depth_n) * first_p.index_select(0, group_n)
        below_p.index_add_(0, group_n, weights_n * (depth_n == 1))
        return weights_n

    def first(self, group_n: Tensor) -> Tensor:
        """[N] w of depth 1: w_1 = q_1 + w_2."""
        first_p, below_p = cast(Tensor, self._first_p), cast(Tensor, self._below_p)
        return (first_p + below_p).index_select(0, group_n)


def weighed(output: DrafterOutput, weights_n: Tensor, num_groups: Tensor) -> DrafterOutput:
    """The loss of rows that came without a sum: theirs, weighted, over the number [] of groups with a label."""
    losses_n = cast(Tensor, output.losses_n)
    loss = (losses_n * weights_n).sum() / one_for_none(num_groups.to(losses_n.dtype))
    return replace(output, loss=loss, losses_n=None, cross_entropy_n=None)
