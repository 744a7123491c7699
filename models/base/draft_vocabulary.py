"""A reduced draft vocabulary: the LM head reads the most frequent tokens only (EAGLE-3's code; FR-Spec, 2502.14856).

The head is most of a draft's cost where the vocabulary is large. With `draft_vocab_size` a drafter reads V' of its
rows, in training and at work, and drafts all other tokens with probability 0: what comes out stays the target's own,
only tau falls by what is never drafted. Which tokens these are is counted in the answers that it is trained on, and
lies inside the checkpoint, in vLLM's layout: `d2t` [V'] are offsets, the token of row i being i + d2t[i]; `t2d` [V]
says of each token whether the head has it.

A head that is the target's stays so: its V' rows are gathered when the drafter is attached, frozen, and in no
checkpoint. Heads of the drafter's own (EAGLE-3's shape, Medusa's and Hydra's) have V' rows, start as the target's and
are trained. The teacher, where the loss has one, is the target's distribution over those V' tokens.

Shapes: V the target's vocabulary, V' the draft vocabulary, N labelled rows, D hidden, G depths.
"""

from collections.abc import Sequence
from typing import Self, cast

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.depth_weights import depth_loss
from draftsmith.models.base.drafter import DraftedShare, Drafter, DrafterConfig
from draftsmith.models.decoding.token_columns import ALL_TOKENS, TokenColumns
from draftsmith.models.groups.alignment import IGNORED_LABEL
from draftsmith.models.head_loss import LowRankLogits, TeacherRows
from draftsmith.models.losses import DrafterOutput

ROWS_AT_ONCE = 1000


class DraftVocabulary(Drafter):
    """A drafter that reads logits off an LM head: which one, the loss through it, and its rows.

    `config.draft_vocab_size` is V', or None for all tokens.
    """

    d2t: Tensor
    t2d: Tensor
    reduced_head: nn.Linear
    _token_counts_v: Tensor | None = None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self._reduced = config.draft_vocab_size is not None
        if self._reduced:  # the lowest ids until the data are counted
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.target_config["vocab_size"]) < config.draft_vocab_size)

    # ---- which head ----

    @property
    def own_heads(self) -> list[nn.Linear]:
        """Linear layers [V', D] that it trains itself, for depths 1, 2, ... or one for all; none by default."""
        return []

    @property
    def borrowed_head(self) -> nn.Linear:
        """The target's frozen head, or the rows of it that are drafted: a linear layer [V', D]."""
        return self.reduced_head if self._reduced and not self.own_heads else self._target_head

    def draft_head(self, depth: int = 0) -> nn.Linear:
        """The linear layer [V', D] that this depth, counted from 0, is read off."""
        heads = self.own_heads or [self.borrowed_head]
        return heads[min(depth, len(heads) - 1)]

    @property
    def draft_ids(self) -> Tensor | None:
        """[V'] the target's ids of the head's rows, ascending; None if it has all of them."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device) if self._reduced else None

    @property
    def columns(self) -> TokenColumns:
        return TokenColumns(self.draft_ids, len(self.t2d)) if self._reduced else ALL_TOKENS

    def attach(self, target: PreTrainedModel) -> Self:
        super().attach(target)
        self.read_draft_vocabulary()
        return self

    @torch.no_grad()
    def initialize_own_heads(self) -> None:
        """Start them as the target's, row by row."""
        source, ids = self._target_head.weight, self.draft_ids
        for head in self.own_heads:
            head.weight.copy_(source if ids is None else source[ids])

    @torch.no_grad()
    def read_draft_vocabulary(self) -> None:
        """Gather the target's rows, if these are what is read."""
        if self.draft_ids is None or self.own_heads:
            return
        source = self._target_head
        ids = self.draft_ids.to(source.weight.device)
        head = nn.Linear(source.in_features, len(ids), bias=source.bias is not None, device="meta")
        # Buffers that are not saved: part of the model wherever it goes, but nothing to train or to store.
        for name, whole in list(source.named_parameters()):
            delattr(head, name)
            head.register_buffer(name, whole.detach()[ids], persistent=False)
        self.reduced_head = head

    @property
    def _target_head(self) -> nn.Linear:
        return cast(nn.Linear, self.attached.lm_head)

    # ---- which tokens ----

    def prepare(self, dataset: Dataset) -> None:
        """Count the supervised tokens of the data and take the most frequent ones."""
        if self._reduced:
            self._token_counts_v = supervised_token_counts(dataset, len(self.t2d))
            self.choose_draft_tokens(self._token_counts_v)

    @property
    def draft_vocabulary(self) -> DraftedShare | None:
        counts_v = self._token_counts_v
        if counts_v is None:
            return None
        share = float(counts_v[self.t2d.cpu()].sum() / counts_v.sum().clamp(min=1))
        return DraftedShare(len(self.d2t), len(counts_v), int((counts_v > 0).sum()), share)

    @property
    def draft_vocabulary_names(self) -> set[str]:
        if not self._reduced:
            return set()
        heads = {f"{name}.weight" for name, module in self.named_modules() if any(module is h for h in self.own_heads)}
        return {"d2t", "t2d"} | heads

    @torch.no_grad()
    def choose_draft_tokens(self, token_counts_v: Tensor) -> None:
        """Take the most frequent tokens, the lower id among equals, and the target's rows for them."""
        chosen = token_counts_v.sort(descending=True, stable=True).indices[: len(self.d2t)].sort().values
        self.d2t.copy_(chosen - torch.arange(len(chosen)))
        self.t2d.zero_()[chosen] = True
        self.initialize_own_heads()
        self.read_draft_vocabulary()

    # ---- what is read off it ----

    def labels_read(self, labels_bgs: Tensor) -> Tensor:
        if not self._reduced or self.config.loss != "ce":
            return super().labels_read(labels_bgs)
        return self.t2d[labels_bgs.clamp(min=0)]

    def loss_of_rows(
        self,
        normed_nd: Tensor,
        depth_n: Tensor,
        labels_n: Tensor,
        teacher: TeacherRows | None,
        depth_weights_g: Tensor | Sequence[float],
        counts_g: Tensor | None = None,
        head: nn.Linear | None = None,
        low_rank: LowRankLogits | None = None,
        summed: bool = True,
        overlap: bool = False,
    ) -> DrafterOutput:
        """`depth_loss` of `config.loss`, through the draft head or a given one of `own_heads`.

        Rows of final-normed hidden states, labels of the target; `counts_g`, `low_rank`, `summed` and `overlap` as
        there. A label outside carries no `ce`; other losses have a teacher, who says what is likely inside.
        """
        # Borrowed rows are the teacher's too; an own head's teacher is restricted to its columns.
        own = bool(self.own_heads)
        return depth_loss(
            normed_nd,
            depth_n,
            self._head_labels(labels_n),
            self.draft_head() if head is None else head,
            depth_weights_g,
            loss=self.config.loss,
            teacher=teacher,
            teacher_head=self._target_head if own else self.borrowed_head,
            teacher_columns=self.draft_ids if own else None,
            counts_g=counts_g,
            low_rank=low_rank,
            summed=summed,
            overlap=overlap,
        )

    def over_all_tokens(self, logits: Tensor) -> Tensor:
        """[..., V'] to [..., V], -inf for tokens that are not drafted."""
        return self.columns.widened(logits, float("-inf"))

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
