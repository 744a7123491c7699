"""Drafters made of decoder layers of the target's kind, trained on all groups of a sequence at once (2410.05589, 4.1).

Stream 0 of a group reads the newest token and what the target knew before it. Further streams, if any, follow it:
masks, whose depths all come from one forward (`masks.py`), or the drafter's own output (EAGLE-3). Only the rows that
carry a label are computed, with group attention; a drafter at work attends to its own KV cache instead.

Shapes: B batch, S sequence, G streams = depths that are trained, N present rows, D hidden, E input width of a layer, F
features, V vocabulary, V' of them drafted, W tree nodes of a call.
"""

from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.models.base.depth_weights import DpaceWeights, weighed
from draftsmith.models.base.draft_vocabulary import DraftVocabulary
from draftsmith.models.base.drafter import DrafterConfig
from draftsmith.models.base.in_parts import Batch, loss_in_parts
from draftsmith.models.base.options import Attention, DrafterOptions, DraftVocabSize, Loss
from draftsmith.models.groups.alignment import depth_labels, document_starts, previous_features
from draftsmith.models.groups.layers import Rotary, build_target_layers, layers_config
from draftsmith.models.groups.parts import PartRows
from draftsmith.models.groups.rows import GroupRows
from draftsmith.models.head_loss import LowRankLogits, TeacherRows
from draftsmith.models.losses import TEACHER_LOSSES, DrafterOutput


class GroupWiseOptions(DrafterOptions):
    """Of all kinds that are trained so."""

    attention: Attention = "folded"
    loss: Loss = "kl"
    draft_vocab_size: DraftVocabSize = None


class GroupWiseDrafter(DraftVocabulary):
    """A kind says what a row reads (`real_inputs`), and may have other layers or another loss; never other groups."""

    layers: nn.ModuleList
    norm: nn.Module
    layers_config: PreTrainedConfig
    _rotary: Rotary | None = None

    def build(self, config: DrafterConfig) -> None:
        self.layers_config = layers_config(config.target_config, config.num_layers)
        built = build_target_layers(self.layers_config)
        self.layers, self.norm = built.layers, built.norm

    @property
    def needs_teacher(self) -> bool:
        return self.config.loss in TEACHER_LOSSES

    def attach(self, target: PreTrainedModel) -> Self:
        self._rotary = self.make_rotary(target)
        return super().attach(target)

    def make_rotary(self, target: PreTrainedModel) -> Rotary:
        """What turns its queries and keys."""
        return Rotary.of_target(target, self.layers_config)

    @property
    def reads_first_token(self) -> bool:
        """Whether a sequence's first token, which no feature predicted, has a row."""
        return True

    # ---- training ----

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        teacher_features: Tensor | None = None,
        label_counts: Tensor | None = None,
    ) -> DrafterOutput:
        labels_bgs = depth_labels(input_ids, loss_mask, self.config.num_depths)
        present_bgs = self.present(labels_bgs)
        if getattr(self.config, "in_parts", False) and self.config.num_depths > 1:
            batch = Batch(input_ids, self.features_read(features), labels_bgs, position_ids, teacher_features)
            return loss_in_parts(self, batch, present_bgs, label_counts)
        rows = self.rows_of(present_bgs, labels_bgs, position_ids)
        hidden_nd = self.rows_hidden(rows, input_ids, features, position_ids)
        labelled_m = rows.labelled_m
        depth_m = rows.stream_n[labelled_m] - self.first_stream
        index_m = rows.batch_n[labelled_m] * labels_bgs.shape[1] + depth_m
        index_m = index_m * labels_bgs.shape[2] + rows.position_n[labelled_m]
        # h_{t+j} is the feature that predicts the label x_{t+1+j} of depth index j.
        before_m, teacher = rows.token_n[labelled_m] + depth_m, None
        if teacher_features is not None:
            teacher = TeacherRows(teacher_features.flatten(0, 1), before_m)
        labels_m = labels_bgs.flatten()[index_m]
        previous_m = input_ids.flatten()[before_m]
        labelled_md = hidden_nd.index_select(0, labelled_m)
        given = (labelled_md, depth_m, labels_m, teacher, label_counts, previous_m)
        alpha = self.config.options.dpace
        if alpha is None:
            output = self.label_loss(*given)
        else:
            output, group_m = self.label_loss(*given, summed=False), rows.token_n[labelled_m]
            weights = DpaceWeights(alpha, input_ids.numel(), self.config.num_depths)
            weights_m = weights.of(cast(Tensor, output.cross_entropy_n), group_m, depth_m)
            output = weighed(output, weights_m, (depth_m == 0).sum() if label_counts is None else label_counts[0, 0])
        correct = torch.zeros_like(labels_bgs, dtype=torch.bool).flatten()
        correct[index_m] = cast(Tensor, output.correct_n)
        output.correct_bgs = correct.view(labels_bgs.shape)
        return output

    @property
    def first_stream(self) -> int:
        """The stream whose rows predict depth 1; there may be G and more of them."""
        return 0

    def present(self, labels_bgs: Tensor) -> Tensor:
        """[B, G, S] bool, of all streams: the rows to compute, those with a label and what they attend to."""
        return GroupRows.present(labels_bgs)

    def rows_of(self, present_bgs: Tensor, labels_bgs: Tensor, position_ids: Tensor | None) -> GroupRows:
        """The rows that are `present`, and which of them carry a label."""
        return GroupRows.of(present_bgs, labels_bgs, position_ids, self.reads_first_token, self.lays_out(present_bgs))

    def lays_out(self, present_bgs: Tensor) -> bool:
        """Whether the sequences of a batch lie one behind the other for attention, so that padding costs nothing."""
        return self.config.attention == "folded" and len(present_bgs) > 1

    def features_read(self, features: Tensor) -> Tensor:
        """[B, S, F] what a training step reads of the target's features."""
        return features

    def rows_with_labels(self, labels_bgs: Tensor, position_ids: Tensor | None) -> Tensor:
        labelled_bgs = super().rows_with_labels(labels_bgs, position_ids)
        if self.reads_first_token:
            return labelled_bgs
        if position_ids is None:
            position_ids = torch.arange(labels_bgs.shape[2], device=labels_bgs.device)
        starts_bs = document_starts(position_ids.expand(labels_bgs.shape[0], -1))
        return labelled_bgs & ~starts_bs[:, None]

    def label_loss(
        self,
        hidden_nd: Tensor,
        depth_n: Tensor,
        labels_n: Tensor,
        teacher: TeacherRows | None,
        counts_2g: Tensor | None = None,
        previous_n: Tensor | None = None,
        summed: bool = True,
    ) -> DrafterOutput:
        """The loss of N labelled rows: their last hidden states, depth indices, labels and the target's features.

        `counts_2g`: the batch's `label_counts`, of which these rows may be a part. `previous_n`: the tokens before the
        labels. `summed`: whether there is a sum, or `losses_n` alone (D-PACE).
        """
        counts_g, bias = None if counts_2g is None else counts_2g[1], self.token_bias(previous_n)
        normed_nd, shares = self.norm(hidden_nd), self.depth_shares
        return self.loss_of_rows(normed_nd, depth_n, labels_n, teacher, shares, counts_g, low_rank=bias, summed=summed)

    def token_bias(self, previous_n: Tensor | None) -> LowRankLogits | None:
        """What the tokens before the labels add to the rows' logits [N, V']; None: nothing."""
        return None

    def rows_hidden(
        self, rows: GroupRows, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        """[N, D] of the present rows, before the final norm. Features are those AT each token."""
        real_bse = self.real_inputs(input_ids, previous_features(self.features_read(features), position_ids))
        hidden = self.rows_inputs(rows.stream_n, real_bse.flatten(0, 1).index_select(0, rows.token_n)).unsqueeze(0)
        rotary = self.rotary_of(hidden, self.positions(rows, position_ids).unsqueeze(0))
        return self.run_layers(hidden, rotary, group_grid=rows.grid, group_backend=self.config.attention)[0]

    @staticmethod
    def positions(rows: GroupRows, position_ids: Tensor | None) -> Tensor:
        """[N] position ids of the rows: a mask or a drafted token stands behind its group's newest token."""
        if position_ids is None:
            return rows.position_n + rows.stream_n
        batch, _, length = rows.shape
        return position_ids.expand(batch, length).flatten()[rows.token_n] + rows.stream_n

    def rows_inputs(self, stream_n: Tensor, newest_ne: Tensor) -> Tensor:
        """[N, E] of rows of these streams, given the inputs of their groups' newest tokens."""
        return newest_ne

    def part_state(self, inputs_ne: Tensor, hidden_nd: Tensor) -> Tensor:
        """What the masks of a part read of stream 0's rows, given these rows' inputs and outputs."""
        return inputs_ne

    def part_hidden(self, part: PartRows, state_ne: Tensor, ids_p: Tensor) -> Tensor:
        """[n, D] of a part's masks, before the final norm, from `part_state` and all tokens of the batch."""
        raise NotImplementedError

    def stream_hidden(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, G, S, D] of all depths, before the final norm; zeros where there is no row."""
        batch, length = input_ids.shape
        shape = (batch, self.first_stream + self.config.num_depths, length)
        rows = GroupRows.full(shape, input_ids.device, position_ids, self.reads_first_token)
        hidden_nd = self.rows_hidden(rows, input_ids, features, position_ids)
        grid = hidden_nd.new_zeros(batch * shape[1] * length, hidden_nd.shape[-1])
        return grid.index_copy(0, rows.index_n, hidden_nd).unflatten(0, shape)[:, self.first_stream :]

    def group_logits(self, input_ids: Tensor, features: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.over_all_tokens(self.logits_of(self.stream_hidden(input_ids, features, position_ids)))

    # ---- shared by training and decoding ----

    def real_inputs(self, input_ids: Tensor, previous_features: Tensor) -> Tensor:
        """[..., E] of the newest tokens x_t [...], from them and h_{t-1} [..., F]."""
        raise NotImplementedError

    def drafted_inputs(self, input_ids: Tensor, feedback: Tensor) -> Tensor:
        """[W, E] of drafted tokens [W], from them and, in place of h, the outputs that predicted them [W, D]."""
        return self.real_inputs(input_ids, feedback)

    def run_layers(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], **attention: Any) -> Tensor:
        """[1, N, E] to [1, N, D]; `attention` says how the layers attend, see `groups/layers.py`."""
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, **attention)
        return hidden

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V'], of `columns`."""
        head = self.draft_head()
        return head(self.norm(hidden).to(head.weight.dtype))

    def rotary_of(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, N, Dh] at positions [1, N]."""
        if self._rotary is None:
            raise ValueError("the drafter has no target: call drafter.attach(target) first")
        return self._rotary(hidden, position_ids)
