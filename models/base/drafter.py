"""Base class of all drafters q: a `PreTrainedModel` that borrows the target's embedding and LM head.

A kind of drafter is a file of `models/drafters/` with an attribute `DRAFTER`; `drafter.kind` in a recipe is its name.
Its options are in `options.py`, its config in `config.py`, its tokens and LM heads in `draft_vocab.py`. All kinds
predict the same token at a depth, from the same known tokens and features (`models/groups/layout.py`), and share the
loss (`forward`).

Shapes: B batch, S sequence, P = B*S tokens, G depths, N rows, M of them labelled, D hidden, F features
(`feature_layers` times D), V vocabulary.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.draft_vocab import DraftHeads
from draftsmith.models.decoding.decoders import DrafterDecoder, StepwiseDecoder
from draftsmith.models.groups.layout import IGNORED_LABEL, Groups, active, depth_labels, document_starts
from draftsmith.models.loss import (
    AuxiliaryLoss,
    DrafterOutput,
    HeadBlock,
    HeadLoss,
    HeadRows,
    as_tensor_like,
    has_teacher,
    head_loss,
    loss_weights,
    safe_denominator,
)
from draftsmith.models.target.architectures import logit_shape
from draftsmith.models.target.features import FINAL_FEATURES, required_layers, split_features, target_features


class Drafter(DraftHeads):
    """Base of all drafters: attaches to a target, is built from one, and is saved without the target's weights."""

    base_model_prefix = "drafter"
    # Its loss is divided by `label_counts` of the whole batch, so the Trainer need not.
    accepts_loss_kwargs = True
    # Why the kind cannot be trained on features from disk or from servers, for the user.
    offline_obstacle: ClassVar[str | None] = None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.training_step = 0  # optimiser steps done, which the trainer keeps up to date
        # Generator of training's random draws (noise, rows to keep); by default torch's own.
        self.generator: torch.Generator | None = None
        # The target's layers that it reads, ids of `FeatureTap`; whether a first token, without a feature, has a row.
        self.feature_layers = tuple(getattr(config, "feature_layers", None) or (FINAL_FEATURES,))
        self.reads_first_token: bool = config.first_token
        # Weight of the loss through LM heads, relative to 1 for the auxiliary loss; the modules that only the latter
        # trains, and whether it reads each row's acceptance rate.
        self.head_weight, self.auxiliary_modules, self.needs_acceptance = 1.0, list[str](), False
        # Factors on the recipe's learning rate, by prefix of the parameters' names.
        self.learning_rate_factors: dict[str, float] = {}
        self.build(config)
        self.post_init()
        self.add_draft_vocab(config)

    def build(self, config: DrafterConfig) -> None:
        """Make the drafter's own parameters and modules."""

    @property
    def kept_shares(self) -> list[float] | None:
        """Return for each depth the share of rows that training computes; None if it drops none at random."""
        return self.config.options.kept_shares if self.training else None

    # ---- features of the target ----

    @property
    def needs_teacher(self) -> bool:
        """Return whether the loss compares with the target's distribution and so needs `teacher_features`."""
        return has_teacher(self.config.loss) or self.needs_acceptance

    def training_features(
        self,
        target: PreTrainedModel,
        ids_bs: Tensor,
        positions_bs: Tensor | None = None,
        attention_mask_bs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the target; return features [B, S, F], and [B, S, D] for the loss's teacher (None without one)."""
        layers = required_layers(self)
        return split_features(self, target_features(target, ids_bs, attention_mask_bs, positions_bs, layers))

    # ---- training and decoding ----

    def groups(self, input_ids: Tensor, loss_mask: Tensor, position_ids: Tensor | None = None) -> Groups:
        """Return the groups of a batch: labels for each token, and the rows (query positions) to compute."""
        if position_ids is not None:  # no label is in another document than its group
            loss_mask = loss_mask.masked_fill(document_starts(position_ids.expand_as(input_ids)), 0)
        labels_bgs = depth_labels(input_ids, loss_mask, self.config.num_depths)
        # The sequences of a batch follow each other in one for attention, so that padding costs nothing.
        in_documents = getattr(self.config, "attention", None) == "folded" and len(input_ids) > 1
        active_brs = self.active_rows(labels_bgs)
        return Groups.of(input_ids, labels_bgs, active_brs, position_ids, self.reads_first_token, in_documents)

    def active_rows(self, labels_bgs: Tensor) -> Tensor:
        """Return a bool mask [B, R, S] of the rows to compute; a group's last G rows predict the labels [B, G, S]."""
        return active(labels_bgs, self.kept_shares, self.generator)

    def label_counts(self, groups: Groups) -> Tensor:
        """Count the labels of each depth, [2, G]: all of them, and those with a loss through the LM head.

        The loss is divided by these counts. Counts of micro-batches and processes add up to those of the batch. If
        rows are dropped at random, expected counts are used, which are known before any micro-batch is computed.
        """
        has_label_bgs = is_read_bgs = groups.labels_bgs != IGNORED_LABEL
        if self.config.draft_vocab_size is not None and not has_teacher(self.config.loss):
            is_read_bgs = has_label_bgs & self.t2d[groups.labels_bgs.clamp(min=0)]
        counts_2g = torch.stack([has_label_bgs, is_read_bgs]).sum((1, 3)).float()
        shares = self.kept_shares
        return counts_2g if shares is None else counts_2g * as_tensor_like(shares, counts_2g)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        teacher_features: Tensor | None = None,
        label_counts: Tensor | None = None,
        groups: Groups | None = None,
    ) -> DrafterOutput:
        """Return the training loss of all groups of a batch.

        A row (one depth of a group) has a loss through the LM head, plus the kind's auxiliary loss. Each is averaged
        over the rows of a depth, then weighted with the depth's share. The average also counts rows after their
        group's first error (weight 0 with `until_first_error`) and labels outside the draft vocabulary; if `ce` is the
        only loss, the latter are not counted.

        Args:
            input_ids: [B, S]. Padding must be on the right, where causal attention does not see it.
            features: [B, S, F], the target's features AT each token.
            loss_mask: [B, S], 1 at tokens that may be predicted.
            position_ids: [B, S], 0..S-1 by default; they start again at 0 in each packed document.
            teacher_features: [B, S, D] final features, which the target's LM head reads. Required if the loss needs
                them (`needs_teacher`) and `features` are of other layers.
            label_counts: [2, G] counts of the whole batch, if this is a micro-batch of it: the micro-batches' losses
                then add up to the batch's loss. By default `label_counts(groups)`, those of this batch alone.
            groups: Result of `groups(input_ids, loss_mask, position_ids)`, if it was computed before.
        """
        groups = self.groups(input_ids, loss_mask, position_ids) if groups is None else groups
        label_counts = self.label_counts(groups) if label_counts is None else label_counts
        if teacher_features is None and self.needs_teacher:
            if self.feature_layers != (FINAL_FEATURES,):
                raise ValueError("the loss needs the target's final features: pass `teacher_features`")
            teacher_features = features
        features_pd = None if teacher_features is None else teacher_features.flatten(0, 1)
        config, heads = self.config, list[tuple[HeadRows, HeadLoss]]()
        reads_teacher = has_teacher(config.loss) or self.needs_acceptance
        teacher = None if features_pd is None or not reads_teacher else self.teacher(features_pd)
        loss = {name: self.head_weight * weight for name, weight in loss_weights(config.loss).items()}
        hidden_nd = self.hidden_states(groups, features)
        # Of rows that the head reads, and of all; times `unit`, as the gradients of small weights are zero in fp16.
        unit = safe_denominator(label_counts.max())
        shares_g = as_tensor_like(config.options.depth_shares, hidden_nd)
        weights_2g = unit * shares_g / safe_denominator(label_counts.to(shares_g.dtype))
        wrong_pg = None
        if getattr(config, "until_first_error", False):
            wrong_pg = hidden_nd.new_zeros(input_ids.numel(), config.num_depths, dtype=torch.bool)
        trained = [each for name in self.auxiliary_modules for each in self.get_submodule(name).parameters()]
        auxiliary = None
        if type(self).auxiliary_loss is not Drafter.auxiliary_loss:
            auxiliary = partial(self.auxiliary_loss, features_pd=features_pd)
        for linear, place_m, normed_md in self.head_inputs(groups, hidden_nd):
            depth_m, label_m, before_m = groups.labels(place_m)
            column_m, token_m = self.label_columns(label_m), groups.input_ids.flatten()[before_m]
            every_m, read_m = (weights_g[depth_m] for weights_g in weights_2g)
            read_m = read_m if has_teacher(config.loss) else read_m * (column_m >= 0)
            rows = HeadRows(column_m, read_m, before_m, groups.token_n[place_m], depth_m, token_m, every_m)
            low_rank = None if self.markov_head is None else self.markov_head.factors(token_m)
            result = head_loss(
                linear, normed_md, rows, loss, teacher, low_rank, self.logit_shape, auxiliary, trained, wrong_pg
            )
            heads.append((rows, result))
        return sum_heads(groups, heads, unit)

    def hidden_states(self, groups: Groups, features: Tensor) -> Tensor:
        """Return the hidden states of all rows of the groups [N, D], or other inputs of the heads.

        `features` [B, S, F] are the target's AT each token; a group may read only the `previous_features`.
        """
        raise NotImplementedError(f"{type(self).__name__}.hidden_states")

    def head_inputs(self, groups: Groups, hidden_nd: Tensor) -> Iterable[tuple[nn.Linear, Tensor, Tensor]]:
        """Yield for each LM head: the layer, the indices [M] of its labelled rows among all N, its inputs [M, D]."""
        raise NotImplementedError(f"{type(self).__name__}.head_inputs")

    def auxiliary_loss(self, block: HeadBlock, features_pd: Tensor | None) -> AuxiliaryLoss | None:
        """Return the kind's additional loss of some rows of an LM head; by default None.

        `features_pd` [P, D] are the target's final features; None if `forward` was called without.
        """
        return None

    def decoder(self, max_length_tokens: int) -> DrafterDecoder | StepwiseDecoder:
        """Make a decoder for sequences of at most this many tokens, prompt included."""
        raise NotImplementedError(f"{type(self).__name__}.decoder")

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Compute the logits [B, G, S, V] that training compares with labels, to check those of decoding.

        A depth that reads draft tokens gets the true tokens. Logits are -inf where no row is computed, and for tokens
        outside a reduced vocabulary.
        """
        groups, features = label_all_groups(self, input_ids, features, position_ids)
        places, logits = list[Tensor](), list[Tensor]()
        for linear, place_m, normed_md in self.head_inputs(groups, self.hidden_states(groups, features)):
            places.append(place_m)
            logits.append(self.logit_shape(linear(normed_md.to(linear.weight.dtype))))
            if self.markov_head is not None:
                _, _, before_m = groups.labels(place_m)
                logits[-1] = logits[-1] + self.markov_head(groups.input_ids.flatten()[before_m]).to(logits[-1].dtype)
        logits_mv = self.columns.widened(torch.cat(logits), float("-inf"))
        return groups.on_grid(torch.cat(places), logits_mv, float("-inf"))[:, :, : input_ids.shape[1]]

    @classmethod
    def make_config(cls, target: PreTrainedModel, options: dict[str, Any]) -> DrafterConfig:
        """Make the config of a new drafter for this target, whose weights are not read (it may be on `meta`).

        Raises:
            UserError: An option is unknown or has a wrong value, or the architecture is not supported.
        """
        config, shape = cls.config_class.for_target(target.config, options), logit_shape(target)
        if not shape.is_plain:
            config.target_logit_scale, config.target_logit_cap = shape.scale, shape.cap
        return config

    @classmethod
    def from_target(cls, target: PreTrainedModel, options: dict[str, Any]) -> Self:
        """Make a new, untrained drafter for this target, attached to it.

        Args:
            options: `drafter.options` of the recipe, keys of the config's `Options`.

        Raises:
            UserError: An option is unknown or has a wrong value, or the architecture is not supported.
        """
        config = cls.make_config(target, options)
        # In fp32 at least, to be trained.
        drafter = cls(config).to(target.device, torch.promote_types(target.dtype, torch.float32)).attach(target)
        with torch.no_grad():
            drafter.initialize_from_target(target)
        return drafter

    def initialize_from_target(self, target: PreTrainedModel) -> None:
        """Initialise parameters from the target's weights, where the kind does so; by default none."""

    def freeze(self) -> Self:
        """Switch to drafting: eval mode, no gradients."""
        return self.eval().requires_grad_(False)


def label_all_groups(
    drafter: Drafter, input_ids: Tensor, features: Tensor, position_ids: Tensor | None
) -> tuple[Groups, Tensor]:
    """Append G tokens 0 to [B, S], so that all groups have G labels; return groups and features [B, S + G, F]."""
    num_depths = drafter.config.num_depths
    ids, features = F.pad(input_ids, (0, num_depths)), F.pad(features, (0, 0, 0, num_depths))
    if position_ids is not None:
        ahead = torch.arange(1, num_depths + 1, device=ids.device)
        position_ids = torch.cat([position_ids, position_ids[:, -1:] + ahead], dim=1)
    return drafter.groups(ids, torch.ones_like(ids), position_ids), features


def sum_heads(groups: Groups, heads: Sequence[tuple[HeadRows, HeadLoss]], unit: Tensor) -> DrafterOutput:
    """Sum losses and counts by depth over all LM heads; the loss is divided by `unit`, a factor of all weights."""
    batch, num_depths, length = groups.labels_bgs.shape
    losses, nats, correct = (list(parts) for parts in zip(*(result for _, result in heads), strict=True))
    depth_m, group_m = torch.cat([rows.depth_m for rows, _ in heads]), torch.cat([rows.group_m for rows, _ in heads])
    nats_m, correct_m = torch.cat(nats), torch.cat(correct)
    zeros_g, counts_g = nats_m.new_zeros(num_depths), depth_m.new_zeros(num_depths)
    correct_bsg = torch.zeros(batch * length * num_depths, dtype=torch.bool, device=depth_m.device)
    correct_bsg = correct_bsg.index_copy(0, group_m * num_depths + depth_m, correct_m)
    return DrafterOutput(
        torch.stack(losses).sum() / unit,
        zeros_g.index_add(0, depth_m, nats_m.masked_fill(nats_m.isinf(), 0.0)),
        zeros_g.index_add(0, depth_m, correct_m.to(zeros_g.dtype)),
        counts_g.index_add(0, depth_m, torch.ones_like(depth_m)),
        counts_g.index_add(0, depth_m, nats_m.isfinite().to(depth_m.dtype)),
        correct_bsg.view(batch, length, num_depths).transpose(1, 2),
    )
