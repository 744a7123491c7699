"""What a decoder is, a drafter while it decodes one sequence, and which tokens the columns of its logits are.

A drafter whose depths do not depend on each other's tokens decodes with a `DrafterDecoder` (ParallelSpec, Medusa); one
that reads its own drafted tokens with a `StepwiseDecoder` (Hydra, EAGLE; a Markov head, which is `OneForward` too).

Shapes: G depths, F features, V the target's vocabulary, V' columns, P prompt, n newly committed
tokens, W tree nodes of one call.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from draftsmith.models.compiling import BACKEND


class TokenColumns:
    """Which tokens the columns of a drafter's logits are: all of the target's, or those of a draft vocabulary.

    A drafter with a reduced draft vocabulary reads V' rows of a head, and its logits have V' columns. Trees are made of
    these columns and name the target's tokens; only what verification samples against is made V wide.

    Args:
        ids: [V'] the target's ids of the columns, ascending; None: all of its tokens, in order.
        vocabulary: V, where there are `ids`.
    """

    def __init__(self, ids: Tensor | None = None, vocabulary: int = 0) -> None:
        self.ids, self._vocabulary = ids, vocabulary
        given: list[int] = [] if ids is None else ids.tolist()
        self._tokens = [*given, -1]  # column -1 is "none", and stays -1
        self._known = frozenset(given)
        self._ids_there = torch.empty(0) if ids is None else ids  # where they were last asked for

    @property
    def reduced(self) -> bool:
        """Whether tokens are missing, or may be."""
        return self.ids is not None

    def __contains__(self, token: int) -> bool:
        return self.ids is None or token in self._known

    def vocabulary_of(self, logits: Tensor) -> int:
        """V, for logits [..., V']."""
        return logits.shape[-1] if self.ids is None else self._vocabulary

    def tokens(self, columns: list[int]) -> list[int]:
        """The target's ids; -1, for no column, stays -1."""
        return columns if self.ids is None else [self._tokens[column] for column in columns]

    def widened(self, values: Tensor, elsewhere: float) -> Tensor:
        """[..., V'] to [..., V], with this value for the tokens that have no column."""
        if self.ids is None:
            return values
        if self._ids_there.device != values.device:
            self._ids_there = self.ids.to(values.device)
        wide = values.new_full((*values.shape[:-1], self._vocabulary), elsewhere)
        return wide.index_copy_(-1, self._ids_there, values)


ALL_TOKENS = TokenColumns()


class SequenceDecoder(Protocol):
    """A drafter while it decodes one sequence. `start` and `observe` only queue."""

    columns: TokenColumns  # what its logits are of

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        """Begin a sequence. prompt_ids [P]; features [P, F], row i being the target's AT prompt token i."""

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Tokens that are final. committed_ids [n]; features [n, F], row i having PREDICTED committed_ids[i]."""


class DrafterDecoder(SequenceDecoder, Protocol):
    """All depths from one forward: what a depth drafts does not depend on the tokens drafted before it."""

    def draft(self) -> Tensor:
        """fp32 logits [G, V'] of depths 1..G after the newest committed token; one forward."""


@runtime_checkable
class StepwiseDecoder(SequenceDecoder, Protocol):
    """A tree level by level: what a node's children are depends on the tokens of the path to it."""

    num_depths: int  # the longest path worth drafting

    def begin(self) -> Tensor:
        """Read what is queued. fp32 logits [1, V'] of the children of node 0, the newest committed token."""

    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Add W nodes below `parents`; fp32 logits [W, V'] of their children.

        Nodes are numbered 1, 2, ... in the order given over all calls since `begin`.
        """


@runtime_checkable
class OneForward(Protocol):
    """A stepwise decoder whose layers run in `begin` alone: `expand` costs next to nothing, however wide a level is."""

    one_forward: bool


@runtime_checkable
class ReadsTokens(Protocol):
    """A decoder that looks tokens up on the host: it is given lists, and tensors of the CPU, wherever the target is."""

    reads_tokens: bool


@runtime_checkable
class Compilable(Protocol):
    """A decoder whose rounds `torch.compile` can run."""

    def compile(self, backend: str = BACKEND) -> None:
        """Before the first sequence."""
