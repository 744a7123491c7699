"""The nodes of a draft tree while it grows level by level: their depths, and who sees whom.

Node 0 is the newest committed token, which every node sees. Shapes: M nodes so far, W new ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.models.decoding.transfers import index_on, to_device

LONGEST_TREE_NODES = 256


class GrowingTree:
    """One drafter's tree; `begin` starts the next in the same memory."""

    def __init__(self, device: torch.device) -> None:
        # Row i: node i. Column i: node i+1, as all see node 0.
        self._ancestors = torch.zeros(LONGEST_TREE_NODES, LONGEST_TREE_NODES - 1, dtype=torch.bool, device=device)
        self._depths = torch.zeros(LONGEST_TREE_NODES, dtype=torch.int64, device=device)
        self.depths: list[int] = []  # the same on the host

    def begin(self) -> None:
        """A tree of node 0 alone."""
        self.depths = [0]

    def forget(self) -> None:
        """No tree at all, until `begin`."""
        self.depths = []

    def add(self, parents: list[int], parents_w: Tensor) -> tuple[Tensor, Tensor]:
        """Add W nodes below `parents`, which are on the device too.

        Returns:
            [W, M + W - 1] bool: which nodes after node 0 each of them sees, itself too; [W] their depths.

        Raises:
            ValueError: A parent does not exist, or the tree grows too large.
        """
        first, end = len(self.depths), len(self.depths) + len(parents)
        if not self.depths or max(parents) >= first:
            raise ValueError(f"parents {parents} must be among the {first} nodes there are: call begin() first")
        if end > LONGEST_TREE_NODES:
            raise ValueError(f"a draft tree of {end} nodes is too large: use at most {LONGEST_TREE_NODES}")
        rows = self._ancestors[first:end]
        if len(parents) == 1:
            rows[0].copy_(self._ancestors[parents[0]])
            rows[0, first - 1].fill_(True)
        else:
            # The whole level at once: for eight nodes less than half the time of a row at a time; for one, twice.
            rows.copy_(self._ancestors.index_select(0, parents_w))
            rows[:, first - 1 : end - 1].fill_diagonal_(True)
        self.depths += [self.depths[parent] + 1 for parent in parents]
        depths = torch.add(self._depths.index_select(0, parents_w), 1, out=self._depths[first:end])
        return rows[:, : end - 1], depths


def depths_below(parents: list[int], depths: list[int], num_depths: int, of_them: str) -> list[int]:
    """The depths of W new nodes below `parents`, [W].

    Args:
        depths: Of the nodes there are.
        num_depths: Nodes of this depth would have no children.
        of_them: What says how many depths there are, for the error.

    Raises:
        ValueError: A parent does not exist, or nothing is drafted so deep.
    """
    if not depths or max(parents) >= len(depths):
        raise ValueError(f"parents {parents} must be among the {len(depths)} nodes there are: begin() first")
    below = [depths[parent] + 1 for parent in parents]
    if max(below) >= num_depths:
        raise ValueError(f"a node at depth {max(below)} has no children: {of_them}")
    return below


def nodes_on(tokens: Tensor | list[int], parents: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and parents of W new nodes on the device, [W] each, in one copy; in none where both recur or are there."""
    if isinstance(tokens, Tensor):
        return tokens, index_on(tuple(parents), device)
    tokens_w, parents_w = to_device([tokens, parents], device)
    return tokens_w, parents_w
