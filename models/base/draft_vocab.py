"""The draft vocabulary and the LM heads that give logits of it, with the Markov head.

The LM head is the target's, frozen, or the drafter's own heads, which start as the target's and are trained. The tokens
of a reduced vocabulary are counted in the training data and stored in the checkpoint, in vLLM's layout: `d2t` [V'] are
offsets, the token of row i being i + d2t[i]; `t2d` [V] says for each token whether the head has it. Rows of the
target's head are gathered when the drafter is attached, and not stored.

**Vocabulary** (EAGLE-3's code; FR-Spec, 2502.14856). With `draft_vocab_size` a head has V' rows, for the most frequent
tokens of the training answers, and all other tokens have q = 0: the output stays the target's own, and only tau is
lower. The teacher, if the loss has one, is the target's distribution over those V' tokens.

**Markov head** (DSpark, arXiv 2607.05147). When all depths come from one forward, depth k does not depend on the token
drafted at depth k-1. `MarkovHead` adds B(x_{k-1}, v) = W1[x_{k-1}] W2 to the logits, of one low rank for all depths: a
bigram's bias, at the price of a gather and a product as wide as the rank. In training x_{k-1} is the true token, in
decoding the drafted one; q of a path is then exact by the chain rule. Depth 1 has the bias too, of the newest committed
token: one rule for all depths. W1 starts as torch's embeddings do, W2 as zeros, so that a drafter starts as without the
head.

Shapes: V the target's vocabulary, V' drafted tokens, D hidden, P tokens, M labelled rows, r rank.
"""

from dataclasses import dataclass
from typing import Self

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.decoding.decoders import ALL_TOKENS, TokenColumns
from draftsmith.models.groups.layout import IGNORED_LABEL
from draftsmith.models.loss import Teacher
from draftsmith.models.target.architectures import logit_shape
from draftsmith.models.target_logits import PLAIN, LogitShape

ROWS_AT_ONCE = 1000


class MarkovHead(nn.Module):
    """DSpark's Markov head: adds a bias to the logits by the previous token x, row x of B = W1 W2, of low rank.

    Args:
        vocabulary: V, the number of possible previous tokens.
        drafted: V', the number of columns of the logits.
        rank: r, the width of W1 and the height of W2.
    """

    def __init__(self, vocabulary: int, drafted: int, rank: int) -> None:
        super().__init__()
        # All other random draws stay as without the head.
        with torch.random.fork_rng(devices=[]):
            self.markov_w1 = nn.Embedding(vocabulary, rank)
            self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def factors(self, previous_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N, r] and [V', r], the factors of the logits' bias [N, V'] after N previous tokens [N]."""
        return self.markov_w1(previous_n), self.markov_w2.weight

    def forward(self, previous: Tensor) -> Tensor:
        """Map previous tokens [...] to the bias of the logits [..., V'], in the weights' dtype."""
        return self.markov_w2(self.markov_w1(previous))


@dataclass(frozen=True)
class VocabCoverage:
    """Coverage of a draft vocabulary: the share of the training tokens with loss that a drafter can draft."""

    size: int  # number of tokens that the drafter can draft
    vocabulary: int  # number of all tokens
    seen: int  # number of different tokens in the data
    coverage: float

    def sentence(self) -> str:
        """Return the coverage as a sentence for the terminal."""
        sentence = (
            f"the draft vocabulary, {self.size:,} of {self.vocabulary:,} tokens, covers {self.coverage:.2%} of the "
            "answers' tokens"
        )
        if self.seen < self.size:
            return (
                f"{sentence}; only {self.seen:,} occur in data: drafter.options.draft_vocab_size={self.seen} is enough"
            )
        return sentence


@dataclass
class Attached:
    """The target and the modules borrowed from it. As a plain object, it registers none of them in the drafter."""

    target: PreTrainedModel
    embedding: nn.Module
    lm_head: nn.Linear
    shape: LogitShape  # scale and cap from the LM head's product to logits


class DraftHeads(PreTrainedModel):
    """Base of `Drafter`: the modules borrowed from the target, the draft vocabulary, and the LM heads [V', D].

    Its tensors are the buffers `d2t` and `t2d`, own heads (`lm_head`, or `lm_heads` for depths 1, 2, ...),
    `markov_head`, and the rows of the target's head.
    """

    config_class = DrafterConfig
    d2t: Tensor
    t2d: Tensor
    reduced_head: nn.Linear

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self._attached: Attached | None = None
        self.token_counts_v: Tensor | None = None  # of the data, once it is prepared

    def add_draft_vocab(self, config: DrafterConfig) -> None:
        """Add the Markov head, and `d2t` and `t2d` of a reduced vocabulary: its lowest ids until tokens are counted."""
        vocabulary, drafted = config.target_config.get("vocab_size", 0), config.draft_vocab_size
        if drafted is not None:
            self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(vocabulary) < drafted)
        rank = getattr(config, "markov_rank", 0)
        self.markov_head = MarkovHead(vocabulary, drafted or vocabulary, rank) if rank else None

    def get_input_embeddings(self) -> None:
        """Return None: the embeddings are the target's, so nothing is tied, split or resized."""

    def get_output_embeddings(self) -> None:
        """Return None: no head of a drafter is tied to embeddings."""

    def attach(self, target: PreTrainedModel) -> Self:
        """Borrow the target's frozen embedding and LM head. They are neither parameters of this model nor saved.

        Raises:
            UserError: The drafter was made for a target of another kind or size.
        """
        self.config.check_same_target(target)
        head, shape = target.get_output_embeddings(), logit_shape(target)
        self._attached = Attached(target, target.get_input_embeddings(), head, shape)
        self.gather_head_rows()
        return self

    @property
    def attached(self) -> Attached:
        """Return the attached target and the modules borrowed from it.

        Raises:
            ValueError: The drafter has no target.
        """
        if self._attached is None:
            raise ValueError("the drafter has no target: call drafter.attach(target) first")
        return self._attached

    # ---- LM heads ----

    @property
    def own_heads(self) -> list[nn.Linear]:
        """Return the LM heads that the drafter trains: one for each depth from 1, one for all, or none."""
        modules = self._modules
        return list(modules.get("lm_heads", [modules["lm_head"]] if "lm_head" in modules else []))

    @property
    def borrowed_head(self) -> nn.Linear:
        """Return the target's frozen LM head; with a reduced draft vocabulary only the rows of its tokens."""
        is_gathered = self.draft_ids is not None and not self.own_heads
        return self.reduced_head if is_gathered else self.attached.lm_head

    def head(self, depth: int = 0) -> nn.Linear:
        """Return the LM head of this depth, counted from 0: the drafter's own, or the target's."""
        heads = self.own_heads
        return heads[min(depth, len(heads) - 1)] if heads else self.borrowed_head

    @property
    def logit_shape(self) -> LogitShape:
        """Return the scale and cap of the LM head's logits: the target's for its head, none for own heads."""
        return PLAIN if self.own_heads else self.attached.shape

    def head_logits(self, normed: Tensor, depth: int = 0) -> Tensor:
        """Map normed hidden states [..., D] to logits [..., V'] of this depth, without the Markov head's bias."""
        linear = self.head(depth)
        return self.logit_shape(linear(normed.to(linear.weight.dtype)))

    def teacher(self, features_pd: Tensor) -> Teacher:
        """Return the teacher, the target's distribution over the draft vocabulary, given its final features [P, D]."""
        # A borrowed head is its own teacher; for an own head the teacher's logits are restricted to its columns.
        if self.own_heads:
            return Teacher(features_pd, self.attached.lm_head, self.draft_ids, self.attached.shape)
        return Teacher(features_pd, self.borrowed_head, None, self.attached.shape)

    @torch.no_grad()
    def start_own_heads(self) -> None:
        """Copy the rows of the target's LM head into the own heads, times the scale of the target's logits."""
        source, ids, scale = self.attached.lm_head.weight, self.draft_ids, self.attached.shape.scale
        for head in self.own_heads:
            head.weight.copy_(source if ids is None else source[ids]).mul_(scale)

    @torch.no_grad()
    def gather_head_rows(self) -> None:
        """Gather the draft vocabulary's rows of the target's LM head, if the drafter uses that head."""
        if self.draft_ids is None or self.own_heads:
            return
        source = self.attached.lm_head
        ids = self.draft_ids.to(source.weight.device)
        head = nn.Linear(source.in_features, len(ids), bias=source.bias is not None, device="meta")
        # Buffers that are not saved: part of the model wherever it goes, but nothing to train or to store.
        for name, whole in list(source.named_parameters()):
            delattr(head, name)
            head.register_buffer(name, whole.detach()[ids], persistent=False)
        self.reduced_head = head

    # ---- drafted tokens ----

    @property
    def draft_ids(self) -> Tensor | None:
        """Return the target's token ids of the head's rows [V'], ascending; None if the head has all tokens."""
        if self.config.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def columns(self) -> TokenColumns:
        """Return the map from columns of the decoders' logits to token ids."""
        return ALL_TOKENS if self.draft_ids is None else TokenColumns(self.draft_ids, len(self.t2d))

    def label_columns(self, labels_m: Tensor) -> Tensor:
        """Map label tokens [M] to columns of the logits [M], -100 for tokens outside the draft vocabulary."""
        if self.config.draft_vocab_size is None:
            return labels_m
        return (self.t2d.cumsum(0) - 1).masked_fill(~self.t2d, IGNORED_LABEL)[labels_m]

    def prepare_draft_vocab(self, dataset: Dataset) -> None:
        """Count the data's tokens with loss, before the first step; make the most frequent the draft vocabulary."""
        if self.config.draft_vocab_size is None:
            return
        self.token_counts_v = torch.zeros(len(self.t2d), dtype=torch.int64)
        for rows in dataset.with_format("torch", columns=["input_ids", "loss_mask"]).iter(batch_size=ROWS_AT_ONCE):
            ids, mask = (torch.cat(list(rows[name])) for name in ("input_ids", "loss_mask"))
            self.token_counts_v += torch.bincount(ids[mask.bool()], minlength=len(self.t2d))
        self.choose_draft_vocab(self.token_counts_v)

    @torch.no_grad()
    def choose_draft_vocab(self, token_counts_v: Tensor) -> None:
        """Make the most frequent tokens the draft vocabulary (among equals the lower ids); copy their head rows."""
        chosen = token_counts_v.sort(descending=True, stable=True).indices[: len(self.d2t)].sort().values
        self.d2t.copy_(chosen - torch.arange(len(chosen)))
        self.t2d.zero_()[chosen] = True
        self.start_own_heads()
        self.gather_head_rows()

    def extend_draft_vocab(self, t2d: Tensor) -> None:
        """Fill the draft vocabulary with the counted tokens, then with those of another one, `t2d` [V] bool."""
        if self.token_counts_v is not None:
            self.choose_draft_vocab(2 * self.token_counts_v + t2d.cpu())

    @property
    def vocab_coverage(self) -> VocabCoverage | None:
        """Return the draft vocabulary's coverage; None for a full vocabulary, or before tokens are counted."""
        counts_v = self.token_counts_v
        if counts_v is None:
            return None
        share = float(counts_v[self.t2d.cpu()].sum() / counts_v.sum().clamp(min=1))
        return VocabCoverage(len(self.d2t), len(counts_v), int((counts_v > 0).sum()), share)

    @property
    def vocab_names(self) -> set[str]:
        """Return the names of the tensors that depend on the draft vocabulary: its maps, and own heads."""
        if self.config.draft_vocab_size is None:
            return set()
        heads = {id(head) for head in self.own_heads}
        return {"d2t", "t2d"} | {f"{name}.weight" for name, each in self.named_modules() if id(each) in heads}

    @property
    def vocab_row_names(self) -> set[str]:
        """Return names of trained tensors with a row for each drafted token: own heads, and the Markov head's W2."""
        markov = set() if self.markov_head is None else {"markov_head.markov_w2.weight"}
        return markov | (self.vocab_names - {"d2t", "t2d"})
