"""The draft tree: the candidate tokens of one round. Its shape decides the attention mask, the positions and the paths.

Node 0 is the root, the last committed token, which the target has not processed yet; the others are drafted.
A node's ancestors come before it, so that a prefix of the nodes is a tree too. SpecInfer (arXiv 2305.09781) section 4.

Shapes: N tree nodes (root included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from draftsmith.models.decoding.kv_cache import to_device


class TreeShape:
    """Who is whose parent. Immutable; equal shapes are shared, so that masks are built once (`TreeShape.of`).

    Args:
        parents: [N], -1 for the root.
        num_candidates: Nodes from this one on are run through the target but never accepted: nobody's `children`. None:
            there are none such.
    """

    def __init__(self, parents: tuple[int, ...], num_candidates: int | None = None) -> None:
        if not parents or parents[0] != -1:
            raise ValueError(f"a draft tree's first node is its root with parent -1, not {parents[:1]}")
        depths = [0]
        children: list[list[int]] = [[] for _ in parents]
        for node in range(1, len(parents)):
            parent = parents[node]
            if not 0 <= parent < node:
                raise ValueError(f"parent {parent} of tree node {node} must be one of the nodes before it")
            depths.append(depths[parent] + 1)
            if num_candidates is None or node < num_candidates:
                children[parent].append(node)
        self.parents, self.num_candidates = parents, num_candidates
        self.depths = tuple(depths)
        self.children = tuple(tuple(nodes) for nodes in children)
        self.max_depth = max(depths)
        self.draft_depth = max(depths[:num_candidates])  # of what may be accepted

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(parents: tuple[int, ...], num_candidates: int | None = None) -> TreeShape:
        return TreeShape(parents, num_candidates)

    @staticmethod
    def chain(num_drafted: int) -> TreeShape:
        """Root and `num_drafted` tokens one after the other."""
        return TreeShape.of(tuple(range(-1, num_drafted)))

    @staticmethod
    def of_nodes(nodes: Sequence[int], parents: Sequence[int], num_candidates: int | None = None) -> TreeShape:
        """Of some of a tree's nodes, ascending, with the parents of all; the others are those of the whole tree."""
        new_index = {-1: -1} | {node: index for index, node in enumerate(nodes)}
        kept = tuple(new_index[parents[node]] for node in nodes)
        if num_candidates is None:
            return TreeShape.of(kept)
        return TreeShape.of(kept, sum(node < num_candidates for node in nodes))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def attention_mask(self) -> Tensor:
        """[N, N] bool: row u is true at u and at u's ancestors."""
        # Bytes instead of tensors: best-first trees have a new shape nearly every round, and doubling ancestors with
        # gathers takes 17 us where this takes 5 for 13 nodes, 10 for 33 and 12 for 65.
        nodes = len(self.parents)
        rows: list[bytearray] = []
        for node, parent in enumerate(self.parents):
            rows.append(bytearray(rows[parent]) if node else bytearray(nodes))
            rows[node][node] = 1
        return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(nodes, nodes)

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


@dataclass(slots=True)
class DraftTree:
    """Candidate tokens in a shape.

    Args:
        tokens: [N] token ids; tokens[0] is the last committed token.
        shape: The parents, from which everything else follows.
        q: [N, V], or None. Row u is the distribution that the children of node u were drawn from, without replacement
            and in node order (rows of leaves are never read). None: the children were chosen deterministically.
        draws: [N], or None. Below each node its independent draws in order, as (child, row of q), for children that
            come from several drafters, or with replacement: q is [R, V] then, and a child drawn twice is listed twice.
        log_confidence: [N], or None. The drafter's log probability of the path to each node, where a builder knows it:
            the N' best nodes are the best tree of N' nodes.
    """

    tokens: list[int]
    shape: TreeShape
    q: Tensor | None = None
    log_confidence: list[float] | None = None
    draws: list[list[tuple[int, int]]] | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.shape):
            raise ValueError(f"{len(self.tokens)} tokens do not fit a tree of {len(self.shape)} nodes")
        if self.draws is not None:
            if len(self.draws) != len(self.tokens) or self.q is None:
                raise ValueError(f"{len(self.tokens)} nodes need as many lists of draws, and q: not {len(self.draws)}")
        elif self.q is not None and len(self.q) != len(self.tokens):
            raise ValueError(f"q has {len(self.q)} rows for a tree of {len(self.tokens)} nodes")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def parents(self) -> tuple[int, ...]:
        """[N], -1 for the root."""
        return self.shape.parents

    @property
    def depths(self) -> tuple[int, ...]:
        """[N], 0 for the root."""
        return self.shape.depths

    def children(self, node: int) -> tuple[int, ...]:
        return self.shape.children[node]

    def paths(self) -> list[list[int]]:
        """The nodes from the root to each leaf."""
        return [self.shape.path_to(node) for node in range(len(self)) if node not in self.parents]

    def cut_to_depth(self, max_depth: int) -> DraftTree:
        """The same tree without the nodes deeper than `max_depth`: tokens that could not be kept anyway."""
        if self.shape.max_depth <= max_depth:
            return self
        return self.cut_to([node for node, depth in enumerate(self.depths) if depth <= max_depth])

    def cut_to(self, nodes: list[int]) -> DraftTree:
        """The same tree of these nodes alone: ascending, with the parents of all."""
        if len(nodes) == len(self):
            return self
        tokens = [self.tokens[node] for node in nodes]
        shape = TreeShape.of_nodes(nodes, self.parents, self.shape.num_candidates)
        confidence = None if self.log_confidence is None else [self.log_confidence[node] for node in nodes]
        if self.draws is None:
            q = None if self.q is None else self.q.index_select(0, to_device(nodes, self.q.device))
            return DraftTree(tokens, shape, q, confidence)
        new_index = {node: index for index, node in enumerate(nodes)}
        draws = [[(new_index[child], row) for child, row in self.draws[node] if child in new_index] for node in nodes]
        return DraftTree(tokens, shape, self.q, confidence, draws)


def root_only(token: int) -> DraftTree:
    """Nothing drafted: what makes the verification loop the autoregressive one."""
    return DraftTree([token], TreeShape.chain(0))
