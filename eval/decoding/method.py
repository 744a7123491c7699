"""What the loop asks of a way of proposing tokens: three calls. It does not know which one it runs.

Shapes: P prompt, n newly committed tokens, F features (those of the session's layers, one after the other), N tree
nodes, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from draftsmith.eval.trees.verify import DraftTree, root_only
from draftsmith.models.decoding.decoders import TokenColumns

AUTOREGRESSIVE = "autoregressive"


class Method(Protocol):
    """A way to build a round's draft tree.

    start: a new sequence; features [P, F] are the target's *at* the prompt's tokens.
    propose: the tree under the newest committed token.
    observe: tokens were committed; features [n, F] are the target's that *predicted* them, at the token before each.
    sequential: whether it drafts token after token, a model's forward each (Leviathan's gamma c), or in one (c).
    """

    name: str
    sequential: bool

    def start(self, prompt_ids: list[int], features: Tensor) -> None: ...

    def propose(self) -> DraftTree: ...

    def observe(self, committed_ids: list[int], features: Tensor) -> None: ...


class Autoregressive:
    """Proposes nothing: the same loop becomes the baseline that every speedup is measured against."""

    name = AUTOREGRESSIVE
    sequential = False

    def __init__(self) -> None:
        self._newest = -1

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        pass

    def propose(self) -> DraftTree:
        return root_only(self._newest)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        self._newest = committed_ids[-1]


@runtime_checkable
class DraftsColumns(Protocol):
    """A method with a known set of tokens that it can draft; without one, tokens outside of it are not counted."""

    columns: TokenColumns


@runtime_checkable
class ReadsLogits(Protocol):
    """A method that reads the target's logits of the whole tree, as Lookahead decoding does."""

    def read_logits(self, tree: DraftTree, logits: Tensor) -> None:
        """Read the logits [N, V] of a verification forward, before `observe`."""
