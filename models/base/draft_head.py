"""The draft head: what reads a drafter's hidden rows, and how the losses of rows become the loss of a training step.

**Vocabulary** (EAGLE-3's code; FR-Spec, 2502.14856). With `draft_vocab_size` a head has V' rows, for the most frequent
tokens of the answers that are trained on, and all other tokens are drafted with probability 0: the output stays the
target's own, only tau falls by what is never drafted. The teacher, where the loss has one, is the target's distribution
over those V' tokens, and a row's losses to it count by the probability that the target gives them
(`models/losses.py`). That takes a product of the target's whole head with each token of an answer, which nothing else
needs: on one core, with SmolLM2-135M's shape and 16,384 of 49,152 tokens, a step takes 1.08 (P-EAGLE) to 1.20 times
(EAGLE, whose head has but one row a token) as long. With `teacher_mass: false` there is none, and all rows count 1.

**Markov head** (DSpark, arXiv 2607.05147). Where all depths come from one forward, depth k does not know which token
depth k-1 came to. `MarkovHead` adds B(x_{k-1}, v) = W1[x_{k-1}] W2 to the logits, of one low rank for all depths: a
bigram's bias, at the price of a gather and a product as wide as the rank. In training x_{k-1} is the true token, in
decoding the drafted one; q of a path is then exact by the chain rule. Depth 1 has the bias too, of the newest committed
token: one rule for all depths. W1 starts as torch's embeddings do, W2 as zeros: a drafter starts as it would without.

**Weights.** `depth_weights` gives each depth its share of the loss, a mean over the depth's own rows. With equal
weights from the first step on, the easy part of the deep depths (their marginals) drowns the hard part of the first one
(copying), which forms late: with `depth_ramp` training begins with depth 1 alone and lets the others in one after the
other, as a function of progress alone.

`dpace_alpha` is D-PACE (dynamic position-aware cross entropy, arXiv 2605.18810), which weighs every row by what it is
worth to the drafted length of its own group. With q_i the drafter's probability of the label at depth i,
sum_m prod_{i<=m} q_i is the length that is expected to be accepted, and its gradient is that of sum_j w_j log q_j with

    w_j = sum_{m>=j} prod_{i<=m} q_i      (eq. 8; q_i there is (1 - alpha) q_i + alpha, eq. 7; w_j carries no gradient)

so that the loss of a group is sum_j w_j * (-log q_j) (eq. 9). The weights are not divided by their sum, which would
take the expected length out of it again; over groups we take a mean, as the paper's author asks for
(sgl-project/SpecForge, issue 828; his own code, Lucas-TY/D-PACE, divides by the batch's sequences). Where we decide:
w_j weighs the row's loss whatever that is (KL, TV and LK as in SpecForge, pull request 848; also EAGLE's regression), q
being the label's probability all the same; a token outside the draft vocabulary has q = 0; a row that a conditional
drop leaves out ends its group.

`until_first_error`, with `depth_weights` or with D-PACE, leaves out the losses after the first wrong row of a group
(accept-until-fail training, 2607.01893): a draft is accepted up to its first row whose most likely token is not the
label.

Shapes: B batch, S sequence, P = B*S tokens = groups, G depths, N labelled rows, D hidden, V the target's vocabulary, V'
drafted tokens, r rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor, nn

from draftsmith.models.groups.rows import IGNORED_LABEL
from draftsmith.models.losses import (
    DrafterOutput,
    HeadLoss,
    LossWeights,
    LowRankLogits,
    RowFactors,
    TeacherRows,
    has_teacher,
    head_loss,
    mass_inside,
    numbers_beside,
    one_for_none,
    softmax_dtype,
)
from draftsmith.models.target_logits import LogitShape

ROWS_AT_ONCE = 1000


class MarkovHead(nn.Module):
    """B = W1 W2, with DSpark's names.

    Args:
        vocabulary: V, the tokens that may come before.
        drafted: V', the columns of the logits.
        rank: r.
    """

    def __init__(self, vocabulary: int, drafted: int, rank: int) -> None:
        super().__init__()
        # Whatever else is drawn stays what it is without the head.
        with torch.random.fork_rng(devices=[]):
            self.markov_w1 = nn.Embedding(vocabulary, rank)
            self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def factors(self, previous_n: Tensor) -> LowRankLogits:
        """Return the bias of N previous tokens [N] as its two factors."""
        return LowRankLogits(self.markov_w1(previous_n), self.markov_w2.weight)

    def forward(self, previous: Tensor) -> Tensor:
        """Map tokens [...] to [..., V'], in the weights' dtype."""
        return self.markov_w2(self.markov_w1(previous))


@dataclass(frozen=True)
class DraftHead:
    """The LM head that a depth is read off, with its vocabulary, its teacher and its loss.

    Args:
        linear: [V', D], the target's or the drafter's own.
        loss: The losses of a row, keys of `LOSSES`, and their weights.
        teacher: The target's head; `linear` itself where its rows are the target's.
        teacher_columns: [V'] the tokens of the head's rows among the teacher's, where these are more.
        t2d: [V] bool, whether the head has a token; None if it has all.
        markov: What the token before adds to the logits.
        shape, teacher_shape: What is made of the head's product, and of the teacher's.
    """

    linear: nn.Linear
    loss: LossWeights
    teacher: nn.Linear
    teacher_columns: Tensor | None
    t2d: Tensor | None
    markov: MarkovHead | None
    shape: LogitShape
    teacher_shape: LogitShape

    def rows_of(self, labels_n: Tensor) -> Tensor:
        """Return rows of the head [N] for tokens [N], -100 for those that it does not have."""
        if self.t2d is None:
            return labels_n
        return (self.t2d.cumsum(0) - 1).masked_fill(~self.t2d, IGNORED_LABEL)[labels_n]


class LabelledRows(NamedTuple):
    """Rows that carry a label and are read off one head."""

    head: DraftHead
    normed_nd: Tensor  # [N, D] final-normed hidden states
    depth_n: Tensor  # [N] from 0
    token_n: Tensor  # [N] the place of the group's newest token in [P]
    others: Any = None  # what `further_losses` reads beside them


@dataclass(frozen=True)
class Batch:
    """What a training step is given; see `Drafter.forward`.

    Args:
        input_ids: [B, S].
        labels_bgs: [B, G, S], -100 where there is none.
        features: [B, S, F] of the target, AT each token.
        position_ids: [B, S], if they are not 0..S-1.
        teacher_features: [B, S, D] that the target's head reads, if the loss compares with the target.
        counts_2g: `Drafter.label_counts` of the whole batch that these rows are a part of; these rows by default.
    """

    input_ids: Tensor
    labels_bgs: Tensor
    features: Tensor
    position_ids: Tensor | None
    teacher_features: Tensor | None
    counts_2g: Tensor | None


@dataclass
class RowLosses:
    """The losses [N] of a part of the rows, and what `further_losses` may read."""

    rows: LabelledRows
    index_n: Tensor  # their places among the labels [B, G, S]
    labels_n: Tensor  # rows of the head, 0 for those that it has not
    before_n: Tensor  # the tokens before the labels
    teacher: TeacherRows | None
    low_rank: LowRankLogits | None
    read_n: Tensor  # 1 for rows that the loss through the head reads: `ce` alone reads no label outside the vocabulary
    known_n: Tensor  # 1 for rows whose label the head has
    through_head: HeadLoss
    right_n: Tensor  # bool: the label is the token that would be drafted
    overlap_n: Tensor | None = None  # alpha, if it was asked for


def training_loss(drafter: Any, batch: Batch, parts: Iterable[LabelledRows]) -> DrafterOutput:
    """Make the loss of a step, and its sums by depth: the one place where rows are weighed.

    The loss of a row is `class_weight` times that through the head, plus `further_losses` of the drafter, if it has
    any. Each is a mean over the rows of its depth, these weighted with the depth's share; with D-PACE a sum over rows,
    weighted by their group's confidence, over the number of groups.

    Args:
        drafter: A `Drafter`.
        parts: All labelled rows, those of each head together.
    """
    credit, shares = drafter.config.options.credit, drafter.depth_shares
    correct = torch.zeros_like(batch.labels_bgs, dtype=torch.bool).flatten()
    mass_p = _teachers_mass(drafter, batch)
    losses, sums, credited = list[Tensor](), list[list[Tensor]](), list[_Credited]()
    for rows in parts:
        shares_g = numbers_beside(rows.normed_nd, shares)
        part = _losses_of(drafter, batch, rows, mass_p, shares_g if credit is None else None)
        result, known_n, depth_n = part.through_head, part.known_n, rows.depth_n
        further = drafter.further_losses(part)
        zeros_g = torch.zeros_like(shares_g)
        sums.append(
            [
                zeros_g.index_add(0, depth_n, result.cross_entropy_n * known_n),
                zeros_g.index_add(0, depth_n, part.right_n.to(known_n.dtype)),
                torch.zeros_like(zeros_g, dtype=depth_n.dtype).index_add(0, depth_n, torch.ones_like(depth_n)),
            ]
        )
        correct[part.index_n] = part.right_n
        if credit is None:
            loss = drafter.class_weight * result.loss
            if further is not None:
                further_n, read_n, row = further
                loss = loss + (further_n * _weights(shares_g, depth_n, read_n, batch.counts_2g, row)).sum()
            losses.append(loss)
        else:
            terms = [(drafter.class_weight * result.losses_n, part.read_n, 1)]
            terms += [] if further is None else [further]
            for losses_n, read_n, row in terms:
                weights_n = _weights(shares_g, depth_n, read_n, batch.counts_2g, row)
                credited.append(_Credited(part, losses_n * read_n, weights_n))
    if credit is not None:
        losses = _by_groups(credit, batch, credited)
    totals = (torch.stack(values).sum(0) for values in zip(*sums, strict=True))
    return DrafterOutput(torch.stack(losses).sum(), *totals, correct_bgs=correct.view(batch.labels_bgs.shape))


def _teachers_mass(drafter: Any, batch: Batch) -> Tensor | None:
    """[P] the target's probability of the draft vocabulary after each token; None where it is 1, or left out."""
    options, head = drafter.config.options, drafter.attached.lm_head
    if drafter.draft_ids is None or batch.teacher_features is None or not has_teacher(options.loss):
        return None
    if not options.teacher_mass:
        return None
    # A deeper depth's label is also the label of depth 1 of a later group.
    wanted_p = (batch.labels_bgs[:, 0] != IGNORED_LABEL).flatten()
    return mass_inside(batch.teacher_features.flatten(0, 1), head, drafter.t2d, wanted_p, drafter.attached.shape)


def _losses_of(
    drafter: Any, batch: Batch, rows: LabelledRows, mass_p: Tensor | None, shares_g: Tensor | None
) -> RowLosses:
    """Losses through the head, summed with weights if the depths' shares are given."""
    head, depth_n, token_n = rows.head, rows.depth_n, rows.token_n
    _, num_depths, length = batch.labels_bgs.shape
    index_n = (token_n // length * num_depths + depth_n) * length + token_n % length
    # h_{t+j} is the feature that predicts the label x_{t+1+j} of depth index j.
    before_n, teacher = token_n + depth_n, None
    if batch.teacher_features is not None:
        teacher = TeacherRows(batch.teacher_features.flatten(0, 1), before_n)
    tokens_n = batch.input_ids.flatten()[before_n]
    low_rank = None if head.markov is None else head.markov.factors(tokens_n)
    labels_n = head.rows_of(batch.labels_bgs.flatten()[index_n])
    known_n = (labels_n >= 0).to(softmax_dtype(rows.normed_nd.dtype))
    labels_n = labels_n.clamp(min=0)
    read_n = torch.ones_like(known_n) if has_teacher(head.loss) else known_n
    factors = None if head.t2d is None else RowFactors(known_n, None if mass_p is None else mass_p[before_n])
    weights_n = None if shares_g is None else _weights(shares_g, depth_n, read_n, batch.counts_2g, 1)
    overlap_n = torch.zeros_like(known_n) if drafter.wants_overlap else None
    result = head_loss(
        rows.normed_nd,
        head.linear,
        labels_n,
        weights_n,
        head.loss,
        teacher,
        head.teacher,
        head.teacher_columns,
        low_rank,
        overlap_n,
        factors,
        head.shape,
        head.teacher_shape,
    )
    right_n = result.correct_n & (known_n > 0)
    return RowLosses(rows, index_n, labels_n, tokens_n, teacher, low_rank, read_n, known_n, result, right_n, overlap_n)


def _weights(shares_g: Tensor, depth_n: Tensor, read_n: Tensor, counts_2g: Tensor | None, row: int) -> Tensor:
    """[N]: the depth's share over the number of its rows, those with `read_n` of 1. `row`: Which counts these are."""
    rows_g = torch.zeros_like(shares_g).index_add(0, depth_n, read_n) if counts_2g is None else counts_2g[row]
    return (shares_g / one_for_none(rows_g.to(shares_g.dtype)))[depth_n] * read_n


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


@dataclass(frozen=True)
class Credit:
    """What the rows of a group count by what the group does, beside their depth; see the module's docstring."""

    dpace_alpha: float | None = None
    until_first_error: bool = False


class _Credited(NamedTuple):
    """Losses [N] of a part's rows, and their weights [N] by depth."""

    part: RowLosses
    losses_n: Tensor
    weights_n: Tensor


def _by_groups(credit: Credit, batch: Batch, credited: list[_Credited]) -> list[Tensor]:
    """[] of each: its losses [N], weighted by depth, or with D-PACE over the number of groups, and by the credit."""
    parts = list({id(each.part): each.part for each in credited}.values())
    num_groups, num_depths = batch.input_ids.numel(), batch.labels_bgs.shape[1]

    def places_of(part: RowLosses) -> Tensor:
        return part.rows.token_n * num_depths + part.rows.depth_n

    place_n = torch.cat([places_of(part) for part in parts])
    nats_n = torch.cat(
        [part.through_head.cross_entropy_n.masked_fill(part.known_n == 0, float("inf")) for part in parts]
    )
    right_n = torch.cat([part.right_n for part in parts])

    def by_group(values_n: Tensor) -> Tensor:
        return values_n.new_zeros(num_groups * num_depths).index_copy(0, place_n, values_n).view(num_groups, -1)

    there_pg = by_group(torch.ones_like(nats_n))
    # Rows that all rows before them in their group are right for: up to the first wrong one, that included.
    right_pg = by_group(right_n.to(there_pg.dtype))
    reached_pg = there_pg * torch.cat([torch.ones_like(right_pg[:, :1]), right_pg[:, :-1]], dim=1).cumprod(1)
    dpace_pg = None
    if credit.dpace_alpha is not None:
        groups = (there_pg[:, 0].sum() if batch.counts_2g is None else batch.counts_2g[0, 0]).to(there_pg.dtype)
        dpace_pg = group_lengths(credit.dpace_alpha, nats_n, place_n, num_groups, num_depths) / one_for_none(groups)
    totals = []
    for part, losses_n, weights_n in credited:
        there_n = places_of(part)
        if dpace_pg is not None:
            weights_n = dpace_pg.flatten()[there_n]
        if credit.until_first_error:
            weights_n = weights_n * reached_pg.flatten()[there_n]
        totals.append((losses_n * weights_n).sum())
    return totals


def group_lengths(alpha: float, cross_entropy_n: Tensor, place_n: Tensor, num_groups: int, num_depths: int) -> Tensor:
    """[P, G] D-PACE's w of the rows of whole groups, 0 where there is none.

    Args:
        alpha: The smoothing, in [0, 1]; with 1 the weights are G, G-1, ... 1.
        cross_entropy_n: -log q of the label.
        place_n: Of each row: the number of its group, from 0, times G, and its depth. A group's depths have no gaps.
    """
    size = num_groups * num_depths
    confidence_n = (1.0 - alpha) * (-cross_entropy_n.detach()).exp() + alpha
    factors_pg = confidence_n.new_ones(size).index_copy(0, place_n, confidence_n).view(num_groups, num_depths)
    there_pg = confidence_n.new_zeros(size).index_fill(0, place_n, 1.0).view(num_groups, num_depths)
    reached_pg = factors_pg.cumprod(1) * there_pg
    return reached_pg.flip(1).cumsum(1).flip(1) * there_pg


@dataclass(frozen=True)
class DraftedShare:
    """How much of the training data a drafter can draft, in tokens that carry loss.

    size, vocabulary: tokens that it drafts, and that there are; seen: different ones in the data.
    """

    size: int
    vocabulary: int
    seen: int
    coverage: float

    def sentence(self) -> str:
        """Return the sentence that the terminal shows."""
        sentence = (
            f"the draft vocabulary, {self.size:,} of {self.vocabulary:,} tokens, covers {self.coverage:.2%} of the "
            "answers' tokens"
        )
        if self.seen < self.size:
            return (
                f"{sentence}; only {self.seen:,} occur in them: drafter.options.draft_vocab_size={self.seen} would do"
            )
        return sentence


def supervised_token_counts(dataset: Dataset, vocabulary: int) -> Tensor:
    """Count how often each token carries loss, [V]."""
    counts_v = torch.zeros(vocabulary, dtype=torch.int64)
    for rows in dataset.with_format("torch", columns=["input_ids", "loss_mask"]).iter(batch_size=ROWS_AT_ONCE):
        ids, mask = (torch.cat(list(rows[name])) for name in ("input_ids", "loss_mask"))
        counts_v += torch.bincount(ids[mask.bool()], minlength=vocabulary)
    return counts_v
