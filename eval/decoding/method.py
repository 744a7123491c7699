"""Interface of a drafting method: `start`, `propose` and `observe`, and optionally `read_logits`.

Shapes: P prompt, n newly committed tokens, F features (those of the session's layers, one after the other), N tree
nodes, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from draftsmith.eval.trees.verify import DraftTree, root_only
from draftsmith.models.decoding.decoders import ALL_TOKENS, TokenColumns

AUTOREGRESSIVE = "autoregressive"


class Method:
    """Base class of drafting methods, which build the draft tree of every round; this one drafts no tokens.

    drafts_trees: whether it drafts trees even with `tree: chain` in the recipe. columns: tokens that it can draft.
    """

    name: str
    drafts_trees = False
    columns: TokenColumns = ALL_TOKENS
    _newest = -1

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        """Start a new sequence; features [P, F] are the target's *at* the prompt's tokens."""

    def propose(self) -> DraftTree:
        """Return the draft tree of the next round; its root is the newest committed token."""
        return root_only(self._newest)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        """Read new committed tokens; features [n, F] are the target's at the token before each, which predicted it."""
        self._newest = committed_ids[-1]

    def read_logits(self, tree: DraftTree, logits: Tensor) -> None:
        """Read the target's logits [N, V] at the nodes of the verified tree, before `observe`; optional."""


class Autoregressive(Method):
    """Method without draft tokens: the autoregressive baseline that every speedup is measured against."""

    name = AUTOREGRESSIVE
