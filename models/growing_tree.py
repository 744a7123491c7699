"""The nodes of a draft tree while it grows level by level: their depths, and who sees whom.

Node 0 is the newest committed token, which every node sees. Shapes: M nodes so far, W new ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST_TREE_NODES = 256


class GrowingTree:
    """One drafter's tree; `begin` starts the next in the same memory."""

    def __init__(self) -> None:
        # Row and column i: node i+1.
        self._ancestors = torch.zeros(LONGEST_TREE_NODES, LONGEST_TREE_NODES, dtype=torch.bool)
        self.depths: list[int] = []

    def begin(self) -> None:
        """A tree of node 0 alone."""
        self.depths = [0]

    def forget(self) -> None:
        """No tree at all, until `begin`."""
        self.depths = []

    def add(self, parents: list[int]) -> Tensor:
        """Add W nodes below `parents`; [W, M + W - 1] bool: which nodes after node 0 each of them sees, itself too.

        Raises:
            ValueError: A parent does not exist, or the tree grows too large.
        """
        first, end = len(self.depths), len(self.depths) + len(parents)
        if not self.depths or max(parents) >= first:
            raise ValueError(f"parents {parents} must be among the {first} nodes there are: call begin() first")
        if end > LONGEST_TREE_NODES:
            raise ValueError(f"a draft tree of {end} nodes is too large: use at most {LONGEST_TREE_NODES}")
        for node, parent in enumerate(parents, start=first):
            row = self._ancestors[node - 1]
            row.zero_() if parent == 0 else row.copy_(self._ancestors[parent - 1])
            row[node - 1] = True
            self.depths.append(self.depths[parent] + 1)
        return self._ancestors[first - 1 : end - 1, : end - 1]
