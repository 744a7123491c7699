"""From the drafter's logits at depths 1..G to a draft tree: a chain, a fixed tree, or the best tree.

The builders are for drafters whose distribution at a depth does not depend on the path to it (ParallelSpec, Medusa).
What is drafted how, by temperature:

    tree        T = 0                      T > 0
    chain       most likely token          sampled from q
    static      ranks of each path         siblings sampled from q without replacement
    best_first  the N most likely paths    the same, deterministic: verified as point masses, lossless too

Shapes: G drafted depths, V vocabulary, N tree nodes.
"""

from __future__ import annotations

import heapq
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.eval.sampling import Sampling
from draftsmith.eval.tree import DraftTree, TreeShape
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MethodRecipe


class TreeBuilder(Protocol):
    """Turns one round's draft into a tree under the last committed token."""

    def build(
        self, root_token: int, logits: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree: ...


class ChainBuilder:
    """One token a depth."""

    def __init__(self, max_depth: int | None = None) -> None:
        self._max_depth = max_depth

    def build(
        self, root_token: int, logits: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """logits: [G, V]."""
        logits = logits[: self._max_depth]
        shape = TreeShape.chain(len(logits))
        if sampling.greedy:
            return DraftTree([root_token, *logits.argmax(-1).tolist()], shape)
        q = sampling.probabilities(logits)
        drawn = torch.multinomial(q, 1, generator=generator)[:, 0].tolist()
        return DraftTree([root_token, *drawn], shape, _q_of_children(q, shape))


class StaticBuilder:
    """The same shape every round, given as Medusa's paths of ranks: [0], [1], [0, 0], ... (arXiv 2401.10774, 2.3)."""

    def __init__(self, paths: list[list[int]]) -> None:
        """
        Raises:
            UserError: A path is empty, repeated or negative, or the path that it continues is absent.
        """
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        known: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        for path in ordered:
            if not path or min(path) < 0 or path in known:
                raise UserError(f"static path {list(path)} must be non-empty, unique and of ranks >= 0: fix `paths`")
            if path[:-1] not in known:
                raise UserError(f"static path {list(path)} needs the path {list(path[:-1])} too: add it to `paths`")
            parents.append(known[path[:-1]])
            known[path] = len(known)
        self._shape = TreeShape.of(tuple(parents))
        self._ranks = [0, *(path[-1] for path in ordered)]
        sibling_index = [0] * len(parents)
        for siblings in self._shape.children:
            for index, node in enumerate(siblings):
                sibling_index[node] = index
        self._draw_index = sibling_index

    def build(
        self, root_token: int, logits: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """logits: [G, V]."""
        depth, width = self._shape.max_depth, max(self._ranks) + 1
        if depth > logits.shape[0] or width > logits.shape[1]:
            raise UserError(
                f"the static tree is {depth} deep and {width} wide, but the drafter drafts {logits.shape[0]} tokens "
                f"of a vocabulary of {logits.shape[1]}: shorten `paths`, or train with more masks"
            )
        logits = logits[:depth]
        if sampling.greedy:
            candidates = logits.topk(width, dim=-1).indices.tolist()
            return self._fill(root_token, candidates, self._ranks)
        q = sampling.probabilities(logits)
        # The order of q / Exp(1) is the order of draws without replacement. All parents at a depth may share the
        # draws: what happens at one of them never depends on the draws of another depth.
        race = q / torch.empty_like(q).exponential_(generator=generator)
        drawn = race.topk(max(self._draw_index) + 1, dim=-1).indices
        in_support = (q.gather(-1, drawn) > 0).tolist()
        candidates = [
            [token if real else -1 for token, real in zip(*rows, strict=True)]
            for rows in zip(drawn.tolist(), in_support, strict=True)
        ]
        tree = _without_blanks(self._fill(root_token, candidates, self._draw_index))
        tree.q = _q_of_children(q, tree.shape)
        return tree

    def _fill(self, root_token: int, candidates: list[list[int]], ranks: list[int]) -> DraftTree:
        depths = self._shape.depths
        drafted = [candidates[depths[node] - 1][ranks[node]] for node in range(1, len(depths))]
        return DraftTree([root_token, *drafted], self._shape)


class BestFirstBuilder:
    """The `nodes` most likely paths under q: exactly the best tree of that size, found with a heap.

    A path is at most as likely as the path that it continues and as the one with the better rank in its last place,
    so taking the best candidate, then adding its next sibling and its first child, meets the paths in order.
    """

    def __init__(self, nodes: int, branch: int, max_depth: int | None = None) -> None:
        self._nodes, self._branch, self._max_depth = nodes, branch, max_depth

    def build(
        self, root_token: int, logits: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """logits: [G, V]."""
        logits = logits[: self._max_depth].float()
        if not sampling.greedy:
            logits = logits / sampling.temperature
        top = logits.topk(min(self._branch, logits.shape[-1]), dim=-1)
        log_q = (top.values - logits.logsumexp(-1, keepdim=True)).tolist()
        candidates = top.indices.tolist()
        depths, width = len(log_q), len(log_q[0])
        tokens, parents = [root_token], [-1]
        # Entries: (-log probability of the path, order of arrival, parent node, depth from 0, rank).
        heap = [(-log_q[0][0], 0, 0, 0, 0)]
        arrivals = 1
        while heap and len(tokens) <= self._nodes:
            cost, _, parent, depth, rank = heapq.heappop(heap)
            tokens.append(candidates[depth][rank])
            parents.append(parent)
            if rank + 1 < width:
                sibling_cost = cost + log_q[depth][rank] - log_q[depth][rank + 1]
                heapq.heappush(heap, (sibling_cost, arrivals, parent, depth, rank + 1))
                arrivals += 1
            if depth + 1 < depths:
                child = (cost - log_q[depth + 1][0], arrivals, len(tokens) - 1, depth + 1, 0)
                heapq.heappush(heap, child)
                arrivals += 1
        return DraftTree(tokens, TreeShape.of(tuple(parents)))


def tree_builder(method: MethodRecipe) -> TreeBuilder:
    """The builder that a recipe's method asks for."""
    if method.tree == "static":
        assert method.paths is not None
        return StaticBuilder(method.paths)
    if method.tree == "best_first":
        return BestFirstBuilder(method.nodes, method.branch, method.max_depth)
    return ChainBuilder(method.max_depth)


def _q_of_children(q: Tensor, shape: TreeShape) -> Tensor:
    """[G, V] by depth to [N, V] by parent. The rows of the deepest leaves repeat the last depth; nobody reads them."""
    depths = shape.depths_tensor.clamp_max(len(q) - 1)
    return q.index_select(0, depths.to(q.device))


def _without_blanks(tree: DraftTree) -> DraftTree:
    """Without the nodes whose token is -1 (top-k or top-p left fewer tokens than siblings), and all below them."""
    if -1 not in tree.tokens:
        return tree
    new_index: dict[int, int] = {-1: -1}
    tokens: list[int] = []
    parents: list[int] = []
    for node, token in enumerate(tree.tokens):
        if token >= 0 and tree.parents[node] in new_index:
            new_index[node] = len(tokens)
            tokens.append(token)
            parents.append(new_index[tree.parents[node]])
    return DraftTree(tokens, TreeShape.of(tuple(parents)))
