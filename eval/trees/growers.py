"""Trees of drafters whose drafts depend on the path (Hydra, EAGLE, Markov heads): grown level by level, a call a level.

The same three trees as in `builders.py`, for drafters whose distribution depends on the path:

    tree        T = 0                      T > 0
    chain       most likely token          sampled from q
    static      ranks of each path         siblings sampled without replacement from their own parent's q
    best_first  EAGLE-2's dynamic tree     the same, deterministic: verified as point masses, lossless too
    adaptive    as much of it as pays      the same, see `adaptive.py`

Shapes: W nodes of one level, V columns of the drafter's logits, N tree nodes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftsmith.eval.trees.adaptive import AdaptiveTree
from draftsmith.eval.trees.candidates import (
    StaticPaths,
    candidates_on_device,
    draw_without_replacement,
    most_likely,
    ranked,
    without_blanks,
)
from draftsmith.eval.trees.device_tree import DeviceTree
from draftsmith.eval.trees.sampling import Sampling, draw, drawn, largest
from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.models.decoding.protocols import StepwiseDecoder
from draftsmith.models.decoding.transfers import index_on


class ChainGrower:
    """One token a depth."""

    def __init__(self, max_depth: int | None = None) -> None:
        self._max_depth = max_depth

    def propose(
        self, root_token: int, decoder: StepwiseDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        num_depths, columns = _depths(decoder, self._max_depth), decoder.columns
        tokens, q_rows = [root_token], []
        logits = decoder.begin()
        for depth in range(num_depths):
            if depth > 0:
                logits = decoder.expand([tokens[depth]], [depth - 1])
            if sampling.greedy:
                column = int(largest(logits))
            else:
                q_rows.append(sampling.probabilities(logits))
                column = draw(q_rows[-1][0], generator)
            tokens += columns.tokens([column])
        # Nobody reads the row of the leaf.
        q = None if sampling.greedy else columns.widened(torch.cat([*q_rows, q_rows[-1]]), 0.0)
        return DraftTree(tokens, TreeShape.chain(num_depths), q)

    def propose_on_device(
        self, root: Tensor, decoder: StepwiseDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DeviceTree:
        """The same tree under the root's token [1]; no token is read on the host."""
        num_depths, columns = _depths(decoder, self._max_depth), decoder.columns
        tokens, q_rows = [root], []
        logits = decoder.begin()
        for depth in range(num_depths):
            if depth > 0:
                logits = decoder.expand(tokens[depth], [depth - 1])
            if sampling.greedy:
                chosen = largest(logits)
            else:
                q_rows.append(sampling.probabilities(logits))
                chosen = drawn(q_rows[-1], generator)
            tokens.append(columns.tokens_of(chosen))
        q = None if sampling.greedy else columns.widened(torch.cat(q_rows), 0.0)
        return DeviceTree.shaped(torch.cat(tokens), TreeShape.chain(num_depths), q)


class StaticGrower:
    """The same shape every round, given as Medusa's paths of ranks."""

    def __init__(self, paths: list[list[int]]) -> None:
        self._paths = StaticPaths.of(paths)
        shape = self._paths.shape
        # The nodes with children, by depth.
        self._levels: list[list[int]] = [[] for _ in range(shape.max_depth)]
        for node, children in enumerate(shape.children):
            if children:
                self._levels[shape.depths[node]].append(node)
        # The decoder's numbers of the nodes that it is given.
        self._number_of = {node: number for number, node in enumerate(node for level in self._levels for node in level)}

    def propose(
        self, root_token: int, decoder: StepwiseDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        shape, columns = self._paths.shape, decoder.columns
        places = self._paths.ranks if sampling.greedy else self._paths.siblings
        tokens = [root_token] + [-1] * (len(shape) - 1)
        number_of: dict[int, int] = {}  # the decoder's number of a node, which is also its row of q
        q_rows: list[Tensor] = []
        for depth, level in enumerate(self._levels):
            # What was not drawn has no children.
            grown = [node for node in level if tokens[node] >= 0]
            if not grown:
                break
            if depth == 0:
                logits = decoder.begin()
                self._paths.check(decoder.num_depths, columns.vocabulary_of(logits))
            else:
                above = [number_of[shape.parents[node]] for node in grown]
                logits = decoder.expand([tokens[node] for node in grown], above)
            width = 1 + max(places[child] for node in grown for child in shape.children[node])
            if sampling.greedy:
                candidates = ranked(logits, width, columns)
            else:
                q_rows.append(sampling.probabilities(logits))
                candidates = draw_without_replacement(q_rows[-1], width, generator, columns)
            for node, row in zip(grown, candidates, strict=True):
                number_of[node] = len(number_of)
                for child in shape.children[node]:
                    tokens[child] = row[places[child]]
        if sampling.greedy:
            return without_blanks(DraftTree(tokens, shape))
        # Nobody reads the rows of leaves.
        rows = torch.tensor([number_of.get(node, 0) for node in range(len(shape))], device=q_rows[0].device)
        q = columns.widened(torch.cat(q_rows), 0.0)
        return without_blanks(DraftTree(tokens, shape, q.index_select(0, rows)))

    def propose_on_device(
        self, root: Tensor, decoder: StepwiseDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DeviceTree:
        """The same tree under the root's token [1]; what was not drawn is -1, and goes on as any other token."""
        shape, columns = self._paths.shape, decoder.columns
        places = self._paths.ranks if sampling.greedy else self._paths.siblings
        tokens, q_rows = [root], []
        for depth, level in enumerate(self._levels):
            if depth == 0:
                logits = decoder.begin()
                self._paths.check(decoder.num_depths, columns.vocabulary_of(logits))
            else:
                first = shape.depths.index(depth)
                grown = tokens[depth].index_select(0, index_on(tuple(node - first for node in level), root.device))
                above = [self._number_of[shape.parents[node]] for node in level]
                logits = decoder.expand(grown.clamp_min(0), above)
            children = [(row, child) for row, node in enumerate(level) for child in shape.children[node]]
            width = 1 + max(places[child] for _, child in children)
            q, candidates = candidates_on_device(logits, width, sampling, generator, columns)
            if q is not None:
                q_rows.append(q)
            # Nodes come level by level, in the order of their parents.
            chosen = index_on(tuple(row * width + places[child] for row, child in children), root.device)
            tokens.append(candidates.flatten()[chosen])
        q = None if sampling.greedy else columns.widened(torch.cat(q_rows), 0.0)
        return DeviceTree.shaped(torch.cat(tokens), shape, q)


class BestFirstGrower:
    """EAGLE-2's dynamic tree (arXiv 2406.16858, section 4).

    1. Expansion: at every depth the `beam` most confident new nodes, `branch` in the paper and by default, get their
       `branch` most likely children. The confidence of a node is the probability of the path to it under q.
    2. Reranking: the `nodes` most confident of all candidates stay.

    We rerank after every depth instead of once. The tree is the same, as nothing below a node is more confident than
    the node; but what cannot stay is not expanded, and a tree that no deeper node can enter is done.

    Args:
        adaptive: How many nodes are worth verifying, by which the tree is cut after every level, so that what would not
            stay is not drafted below; and whether a further level is worth its forward. None: all, always.
        beam: Nodes of a level that are expanded. With `nodes` of them every new node that may stay is, and the tree is
            the best there is under q with at most `branch` children a node: what a heap finds with a call for each
            node takes one for each level.
    """

    def __init__(
        self,
        nodes: int,
        branch: int,
        max_depth: int | None = None,
        adaptive: AdaptiveTree | None = None,
        beam: int | None = None,
    ) -> None:
        self._nodes, self._branch, self._max_depth, self._adaptive = nodes, branch, max_depth, adaptive
        self._beam = branch if beam is None else beam

    def propose(
        self, root_token: int, decoder: StepwiseDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        # Candidates in the order of arrival, the root being 0; cost = -log of the confidence.
        tokens, parents, costs = [root_token], [-1], [0.0]
        number_of = {0: 0}  # the decoder's number of a candidate
        best: list[int] = []
        frontier = [0]
        logits = decoder.begin()
        for depth in range(_depths(decoder, self._max_depth)):
            if depth > 0:
                above = [number_of[parents[node]] for node in frontier]
                logits = decoder.expand([tokens[node] for node in frontier], above)
                for node in frontier:
                    number_of[node] = len(number_of)
            # 1. Expansion.
            first_new = len(tokens)
            drafted = most_likely(logits, self._branch, sampling, decoder.columns)
            for node, row_tokens, row_log_q in zip(frontier, *drafted, strict=True):
                for token, log_q in zip(row_tokens, row_log_q, strict=True):
                    # A drafter may leave tokens without any probability.
                    if log_q > -math.inf:
                        tokens.append(token)
                        parents.append(node)
                        costs.append(costs[node] - log_q)
            # 2. Reranking. The sort is stable: of equals the first to arrive stays, so a parent before its child.
            best = sorted([*best, *range(first_new, len(tokens))], key=costs.__getitem__)[: self._nodes]
            if self._adaptive is not None:
                best = best[: self._adaptive.of_level([-costs[node] for node in best])]
            # Nothing can enter below the last of a full list.
            frontier = [node for node in best[: self._nodes - 1] if node >= first_new][: self._beam]
            if not frontier:
                break
            if self._adaptive is not None and not self._adaptive.worth_a_level([-costs[node] for node in frontier]):
                break
        return _tree_of(best, tokens, parents, costs)


def _tree_of(drafted: list[int], tokens: list[int], parents: list[int], costs: list[float]) -> DraftTree:
    """The root and the candidates `drafted`, in the order of arrival: level by level, so that shapes recur."""
    kept = [0, *sorted(drafted)]
    shape = TreeShape.of_nodes(kept, parents)
    return DraftTree([tokens[node] for node in kept], shape, log_confidence=[-costs[node] for node in kept])


def _depths(decoder: StepwiseDecoder, max_depth: int | None) -> int:
    return decoder.num_depths if max_depth is None else min(decoder.num_depths, max_depth)
