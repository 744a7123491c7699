"""A drafting method: `start`, `propose` and `observe`, and optionally `read_logits`.

Shapes: P prompt, n newly committed tokens, F features (those of the session's layers, one after the other), N tree
nodes, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from draftsmith.eval.trees.verify import DraftTree, root_only
from draftsmith.models.decoding.decoders import ALL_TOKENS, TokenColumns

AUTOREGRESSIVE = "autoregressive"


class Method:
    """A way to build a round's draft tree; this one has no drafts.

    drafts_trees: whether it drafts trees whatever `tree` of the recipe says. columns: the tokens that it can draft.
    """

    name: str
    drafts_trees = False
    columns: TokenColumns = ALL_TOKENS
    _newest = -1

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        """Begin a sequence; features [P, F] are the target's *at* the prompt's tokens."""

    def propose(self) -> DraftTree:
        """Return the tree under the newest committed token."""
        return root_only(self._newest)

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        """Read committed tokens; features [n, F] are the target's that *predicted* them, at the token before each."""
        self._newest = committed_ids[-1]

    def read_logits(self, tree: DraftTree, logits: Tensor) -> None:
        """Read the target's logits [N, V] at the nodes of the verified tree, before `observe`."""


class Autoregressive(Method):
    """Proposes nothing: the same loop becomes the baseline that every speedup is measured against."""

    name = AUTOREGRESSIVE
