"""What a decoder is: a drafter at work on one sequence.

A drafter whose depths do not depend on each other's tokens decodes with a `DrafterDecoder` (ParallelSpec, Medusa); one
that reads its own drafted tokens with a `StepwiseDecoder` (Hydra, EAGLE; a Markov head, which is `OneForward` too).

Shapes: G depths, F features, V columns (`TokenColumns`), P prompt, n newly committed tokens, W tree nodes of one call.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from draftsmith.models.compiling import BACKEND
from draftsmith.models.decoding.token_columns import TokenColumns


class SequenceDecoder(Protocol):
    """A drafter at work on one sequence. `start` and `observe` only queue."""

    columns: TokenColumns  # what its logits are of

    def start(self, prompt_ids: Tensor, features: Tensor, position_offset: int = 0) -> None:
        """Begin a sequence. prompt_ids [P]; features [P, F], row i being the target's AT prompt token i."""

    def observe(self, committed_ids: Tensor, features: Tensor) -> None:
        """Tokens that are final. committed_ids [n]; features [n, F], row i having PREDICTED committed_ids[i]."""


class DrafterDecoder(SequenceDecoder, Protocol):
    """All depths from one forward: what a depth drafts does not depend on the tokens drafted before it."""

    def draft(self) -> Tensor:
        """fp32 logits [G, V] of depths 1..G after the newest committed token; one forward."""


@runtime_checkable
class StepwiseDecoder(SequenceDecoder, Protocol):
    """A tree level by level: what a node's children are depends on the tokens of the path to it."""

    num_depths: int  # the longest path worth drafting

    def begin(self) -> Tensor:
        """Read what is queued. fp32 logits [1, V] of the children of node 0, the newest committed token."""

    def expand(self, tokens: Tensor | list[int], parents: list[int]) -> Tensor:
        """Add W nodes below `parents`; fp32 logits [W, V] of their children.

        Nodes are numbered 1, 2, ... in the order given over all calls since `begin`. Tokens may be on the device [W].
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
