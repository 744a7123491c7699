"""The draft head, which makes logits of a drafter's hidden rows: its vocabulary, and its Markov head.

**Vocabulary** (EAGLE-3's code; FR-Spec, 2502.14856). With `draft_vocab_size` a head has V' rows, for the most frequent
tokens of the answers that are trained on, and all other tokens are drafted with probability 0: the output stays the
target's own, only tau falls by what is never drafted. The teacher, where the loss has one, is the target's distribution
over those V' tokens, and a row's losses to it count by the probability that the target gives them
(`models/loss.py`). That takes a product of the target's whole head with each token of an answer, which nothing else
needs: on one core, with SmolLM2-135M's shape and 16,384 of 49,152 tokens, a step takes 1.08 (P-EAGLE) to 1.20 times
(EAGLE, whose head has but one row a token) as long. With `teacher_mass: false` there is none, and all rows count 1.

**Markov head** (DSpark, arXiv 2607.05147). Where all depths come from one forward, depth k does not know which token
depth k-1 came to. `MarkovHead` adds B(x_{k-1}, v) = W1[x_{k-1}] W2 to the logits, of one low rank for all depths: a
bigram's bias, at the price of a gather and a product as wide as the rank. In training x_{k-1} is the true token, in
decoding the drafted one; q of a path is then exact by the chain rule. Depth 1 has the bias too, of the newest committed
token: one rule for all depths. W1 starts as torch's embeddings do, W2 as zeros: a drafter starts as it would without.

Shapes: B batch, S sequence, P = B*S tokens = groups, G depths, N labelled rows, D hidden, V the target's vocabulary, V'
drafted tokens, r rank.
"""

from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor, nn

from draftsmith.models.groups.layout import IGNORED_LABEL
from draftsmith.models.loss import LossWeights, Teacher, has_teacher
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

    def factors(self, previous_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias of N previous tokens [N] as its two factors, [N, r] and [V', r]."""
        return self.markov_w1(previous_n), self.markov_w2.weight

    def forward(self, previous: Tensor) -> Tensor:
        """Map tokens [...] to [..., V'], in the weights' dtype."""
        return self.markov_w2(self.markov_w1(previous))


@dataclass(frozen=True)
class DraftHead:
    """The LM head that rows are trained through, with its vocabulary, its teacher and its loss.

    Args:
        linear: [V', D], the target's or the drafter's own.
        loss: The losses of a row, keys of `LOSSES`, and their weights.
        teacher: The target's head; `linear` itself where its rows are the target's.
        teacher_columns: [V'] the tokens of the head's rows among the teacher's, where these are more.
        t2d: [V] bool, whether the head has a token; None if it has all.
        markov: Adds to the logits by the token before.
        shape, teacher_shape: What is made of the head's product, and of the teacher's.
        weight: Of the loss through it.
        needs_acceptance: Whether the auxiliary loss reads every row's alpha.
    """

    linear: nn.Linear
    loss: LossWeights
    teacher: nn.Linear
    teacher_columns: Tensor | None
    t2d: Tensor | None
    markov: MarkovHead | None
    shape: LogitShape
    teacher_shape: LogitShape
    weight: float = 1.0
    needs_acceptance: bool = False

    def rows_of(self, labels_m: Tensor) -> Tensor:
        """Return rows of the head [M] for tokens [M], -100 for those that it does not have."""
        if self.t2d is None:
            return labels_m
        return (self.t2d.cumsum(0) - 1).masked_fill(~self.t2d, IGNORED_LABEL)[labels_m]

    def mask_of(self, rows_m: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 1 for the rows that the loss reads [M], given `rows_of`: `ce` alone reads none without a label."""
        return (rows_m >= 0).to(dtype) if not has_teacher(self.loss) else torch.ones_like(rows_m, dtype=dtype)

    def teacher_of(self, features_pd: Tensor | None, token_m: Tensor, mass_p: Tensor | None) -> Teacher | None:
        """Return the teacher of rows whose labels the features of these tokens [M] predict, if there are features."""
        if features_pd is None:
            return None
        mass_m = None if mass_p is None else mass_p[token_m]
        return Teacher(features_pd, token_m, self.teacher, self.teacher_columns, self.teacher_shape, mass_m)


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
