"""A reduced draft vocabulary: the LM head reads the most frequent tokens only (EAGLE-3's code; arXiv 2502.14856).

The drafter's head is then its own, started from the target's rows and trained. Which tokens it has lies inside the
checkpoint, in vLLM's layout: `d2t` [V'] are offsets, the token of row i being i + d2t[i]; `t2d` [V] says of each token
whether the head has it. Tokens outside are drafted with probability 0.

Shapes: V the target's vocabulary, V' the draft vocabulary, N labelled rows, D hidden.
"""

from typing import cast

import torch
from datasets import Dataset
from torch import Tensor, nn

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.groups.alignment import IGNORED_LABEL
from draftsmith.models.losses import DrafterOutput, depth_loss

ROWS_AT_ONCE = 1000


class DraftVocabulary(Drafter):
    """What a drafter with the option `draft_vocab_size` inherits beside its kind."""

    d2t: Tensor
    t2d: Tensor

    def add_draft_vocabulary(self, vocabulary: int, draft_vocabulary: int | None, hidden_size: int) -> None:
        """Make the head and the map, of the lowest ids at first; None for the target's own head."""
        self._vocabulary, self._reduced = vocabulary, draft_vocabulary is not None
        if draft_vocabulary is None:
            return
        self.lm_head = nn.Linear(hidden_size, draft_vocabulary, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocabulary, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(vocabulary) < draft_vocabulary)

    @property
    def draft_ids(self) -> Tensor | None:
        """[V'] the target's ids of the head's rows, ascending; None if it has all of them."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device) if self._reduced else None

    @property
    def draft_head(self) -> nn.Linear:
        """Its own head, or the target's."""
        return cast(nn.Linear, self.lm_head if self._reduced else self.attached.lm_head)

    @torch.no_grad()
    def choose_draft_tokens(self, token_counts_v: Tensor) -> None:
        """Take the most frequent tokens, the lower id among equals, and start their rows from the target's head."""
        chosen = token_counts_v.sort(descending=True, stable=True).indices[: len(self.d2t)].sort().values
        self.d2t.copy_(chosen - torch.arange(len(chosen)))
        self.t2d.zero_()[chosen] = True
        self.initialize_draft_head()

    def initialize_draft_head(self) -> None:
        """The rows of the target's head, if the head is not the target's anyway."""
        if self._reduced:
            self.lm_head.weight.copy_(cast(nn.Linear, self.attached.lm_head).weight[self.draft_ids])

    def prepare(self, dataset: Dataset) -> None:
        """Count the supervised tokens of the data and take the most frequent ones."""
        if self._reduced:
            self.choose_draft_tokens(supervised_token_counts(dataset, self._vocabulary))

    def vocabulary_loss(
        self,
        normed_nd: Tensor,
        depth_n: Tensor,
        labels_n: Tensor,
        teacher_nd: Tensor | None,
        loss: str,
        depth_weights: list[float],
    ) -> DrafterOutput:
        """`losses.depth_loss` through the draft head: rows of final-normed hidden states, labels of the target."""
        return depth_loss(
            normed_nd,
            depth_n,
            self._head_labels(labels_n),
            self.draft_head,
            depth_weights,
            loss=loss,
            teacher_nd=teacher_nd,
            teacher_head=self.attached.lm_head,
            teacher_columns=self.draft_ids,
        )

    def vocabulary_logits(self, normed: Tensor) -> Tensor:
        """[..., D] final-normed to [..., V], -inf for tokens that the head does not have."""
        logits = self.draft_head(normed.to(self.draft_head.weight.dtype))
        if not self._reduced:
            return logits
        everywhere = logits.new_full((*logits.shape[:-1], self._vocabulary), float("-inf"))
        return everywhere.index_copy(-1, self.draft_ids, logits)

    def _head_labels(self, labels_n: Tensor) -> Tensor:
        """Rows of the head, -100 for tokens that it does not have."""
        if not self._reduced:
            return labels_n
        rows_v = (self.t2d.cumsum(0) - 1).masked_fill(~self.t2d, IGNORED_LABEL)
        return rows_v[labels_n]


def supervised_token_counts(dataset: Dataset, vocabulary: int) -> Tensor:
    """[V] how often each token carries loss."""
    counts_v = torch.zeros(vocabulary, dtype=torch.int64)
    for rows in dataset.with_format("torch", columns=["input_ids", "loss_mask"]).iter(batch_size=ROWS_AT_ONCE):
        ids, mask = (torch.cat(list(rows[name])) for name in ("input_ids", "loss_mask"))
        counts_v += torch.bincount(ids[mask.bool()], minlength=vocabulary)
    return counts_v
