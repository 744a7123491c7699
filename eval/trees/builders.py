"""From the drafter's logits at depths 1..G to a draft tree: a chain, a fixed tree, or the best tree.

The builders are for drafters whose distribution at a depth does not depend on the path to it (ParallelSpec, Medusa);
`growers.py` has the same trees for the others.
What is drafted how, by temperature:

    tree        T = 0                      T > 0
    chain       most likely token          sampled from q
    static      ranks of each path         siblings sampled from q without replacement
    best_first  the N most likely paths    the same, deterministic: verified as point masses, lossless too
    adaptive    as many of them as pay     the same; `DrafterMethod` cuts the tree, see `adaptive.py`

Shapes: G drafted depths, R rows, V vocabulary, V' columns of the drafter's logits, N tree nodes.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from draftsmith.eval.trees.adaptive import AdaptiveTree
from draftsmith.eval.trees.candidates import (
    StaticPaths,
    candidates_on_device,
    draw_without_replacement,
    likeliest,
    most_likely,
    ranked,
    without_blanks,
)
from draftsmith.eval.trees.device_tree import DeviceTree
from draftsmith.eval.trees.growers import BestFirstGrower, ChainGrower, StaticGrower
from draftsmith.eval.trees.path_pool import path_pool
from draftsmith.eval.trees.sampling import Sampling, drawn, largest
from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.models.decoding.protocols import DrafterDecoder, OneForward, SequenceDecoder, StepwiseDecoder
from draftsmith.models.decoding.token_columns import ALL_TOKENS, TokenColumns
from draftsmith.models.decoding.transfers import index_on
from draftsmith.recipes.schema import MethodRecipe


class TreeBuilder(Protocol):
    """Gets one round's draft from a drafter: a tree under the newest committed token."""

    def propose(
        self, root_token: int, decoder: Any, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """`decoder` is of the one kind that the builder works with."""


@runtime_checkable
class DeviceBuilder(Protocol):
    """A builder that can leave the tree on the device, so that the host need not wait for it."""

    def propose_on_device(
        self, root: Tensor, decoder: Any, sampling: Sampling, generator: torch.Generator | None
    ) -> DeviceTree:
        """The same tree as `propose`, under the root's token [1]."""


class MarginalBuilder(ABC):
    """Builds a tree from the marginals of all depths, drafted at once."""

    def propose(
        self, root_token: int, decoder: DrafterDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        return self.build(root_token, decoder.draft(), sampling, generator, decoder.columns)

    def propose_on_device(
        self, root: Tensor, decoder: DrafterDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DeviceTree:
        return self.build_on_device(root, decoder.draft(), sampling, generator, decoder.columns)

    @abstractmethod
    def build(
        self,
        root_token: int,
        logits: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
        columns: TokenColumns = ALL_TOKENS,
    ) -> DraftTree:
        """logits: [G, V'], of these columns."""

    @abstractmethod
    def build_on_device(
        self,
        root: Tensor,
        logits: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
        columns: TokenColumns = ALL_TOKENS,
    ) -> DeviceTree:
        """The same under the root's token [1]."""


class ChainBuilder(MarginalBuilder):
    """One token a depth."""

    def __init__(self, max_depth: int | None = None) -> None:
        self._max_depth = max_depth

    def build(
        self,
        root_token: int,
        logits: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
        columns: TokenColumns = ALL_TOKENS,
    ) -> DraftTree:
        """logits: [G, V'], of these columns."""
        logits = logits[: self._max_depth]
        shape = TreeShape.chain(len(logits))
        if sampling.greedy:
            return DraftTree([root_token, *columns.tokens(largest(logits).tolist())], shape)
        q = sampling.probabilities(logits)
        tokens = columns.tokens(drawn(q, generator).tolist())
        return DraftTree([root_token, *tokens], shape, _q_of_children(columns.widened(q, 0.0), shape))

    def build_on_device(
        self,
        root: Tensor,
        logits: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
        columns: TokenColumns = ALL_TOKENS,
    ) -> DeviceTree:
        logits = logits[: self._max_depth]
        q = None if sampling.greedy else sampling.probabilities(logits)
        drafted = largest(logits) if q is None else drawn(q, generator)
        tokens = torch.cat([root, columns.tokens_of(drafted)])
        return DeviceTree.shaped(tokens, TreeShape.chain(len(logits)), None if q is None else columns.widened(q, 0.0))


class StaticBuilder(MarginalBuilder):
    """The same shape every round, given as Medusa's paths of ranks: [0], [1], [0, 0], ... (arXiv 2401.10774, 2.3)."""

    def __init__(self, paths: list[list[int]]) -> None:
        self._paths = StaticPaths.of(paths)

    def build(
        self,
        root_token: int,
        logits: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
        columns: TokenColumns = ALL_TOKENS,
    ) -> DraftTree:
        """logits: [G, V'], of these columns."""
        paths = self._paths
        paths.check(len(logits), columns.vocabulary_of(logits))
        logits = logits[: paths.shape.max_depth]
        if sampling.greedy:
            candidates = ranked(logits, max(paths.ranks) + 1, columns)
            return without_blanks(DraftTree(self._fill(root_token, candidates, paths.ranks), paths.shape))
        q = sampling.probabilities(logits)
        # All parents at a depth may share the draws: what happens at one of them never depends on the draws of
        # another depth.
        candidates = draw_without_replacement(q, max(paths.siblings) + 1, generator, columns)
        tokens = self._fill(root_token, candidates, paths.siblings)
        return without_blanks(DraftTree(tokens, paths.shape, _q_of_children(columns.widened(q, 0.0), paths.shape)))

    def build_on_device(
        self,
        root: Tensor,
        logits: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
        columns: TokenColumns = ALL_TOKENS,
    ) -> DeviceTree:
        paths = self._paths
        paths.check(len(logits), columns.vocabulary_of(logits))
        shape, logits = paths.shape, logits[: paths.shape.max_depth]
        places = paths.ranks if sampling.greedy else paths.siblings
        width = 1 + max(places)
        q, candidates = candidates_on_device(logits, width, sampling, generator, columns)
        chosen = tuple((depth - 1) * width + place for depth, place in zip(shape.depths, places, strict=True))[1:]
        tokens = torch.cat([root, candidates.flatten()[index_on(chosen, root.device)]])
        if q is None:
            return DeviceTree.shaped(tokens, shape)
        depths = tuple(depth for depth, below in zip(shape.depths, shape.children, strict=True) if below)
        q = columns.widened(q, 0.0).index_select(0, index_on(depths, root.device))
        return DeviceTree.shaped(tokens, shape, q)

    def _fill(self, root_token: int, candidates: list[list[int]], columns: tuple[int, ...]) -> list[int]:
        depths = self._paths.shape.depths
        return [root_token, *(candidates[depths[node] - 1][columns[node]] for node in range(1, len(depths)))]


class BestFirstBuilder(MarginalBuilder):
    """The `nodes` most likely paths under q: exactly the best tree of that size, found with a heap.

    A path is at most as likely as the path that it continues and as the one with the better rank in its last place,
    so taking the best candidate, then adding its next sibling and its first child, meets the paths in order.
    """

    def __init__(self, nodes: int, branch: int, max_depth: int | None = None) -> None:
        self._nodes, self._branch, self._max_depth = nodes, branch, max_depth

    def build(
        self,
        root_token: int,
        logits: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
        columns: TokenColumns = ALL_TOKENS,
    ) -> DraftTree:
        """logits: [G, V'], of these columns."""
        candidates, log_q = most_likely(logits[: self._max_depth].float(), self._branch, sampling, columns)
        # The heap's Python takes 25 us for 12 nodes, 60 for 64; topk and logsumexp, which any form needs, 65.
        depths, width = len(log_q), len(log_q[0])
        tokens, parents, log_confidence = [root_token], [-1], [0.0]
        # Entries: (-log probability of the path, order of arrival, parent node, depth from 0, rank).
        heap = [(-log_q[0][0], 0, 0, 0, 0)]
        arrivals = 1
        while heap and len(tokens) <= self._nodes:
            cost, _, parent, depth, rank = heapq.heappop(heap)
            tokens.append(candidates[depth][rank])
            parents.append(parent)
            log_confidence.append(-cost)
            # A drafter may leave tokens without any probability.
            if rank + 1 < width and log_q[depth][rank + 1] > -math.inf:
                sibling_cost = cost + log_q[depth][rank] - log_q[depth][rank + 1]
                heapq.heappush(heap, (sibling_cost, arrivals, parent, depth, rank + 1))
                arrivals += 1
            if depth + 1 < depths:
                child = (cost - log_q[depth + 1][0], arrivals, len(tokens) - 1, depth + 1, 0)
                heapq.heappush(heap, child)
                arrivals += 1
        return DraftTree(tokens, TreeShape.of(tuple(parents)), log_confidence=log_confidence)

    def build_on_device(
        self,
        root: Tensor,
        logits: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
        columns: TokenColumns = ALL_TOKENS,
    ) -> DeviceTree:
        logits = logits[: self._max_depth].float()
        top, log_q = likeliest(logits, self._branch, sampling)
        pool = path_pool(self._nodes, log_q.shape[1], len(log_q), log_q.device)
        if pool is None:  # a tree of hundreds of nodes
            return DeviceTree.of(self.build(int(root), logits, sampling, generator, columns), root.device)
        return pool.best(root, columns.tokens_of(top), log_q, self._nodes)


def tree_builder(method: MethodRecipe, decoder: SequenceDecoder, adaptive: AdaptiveTree | None = None) -> TreeBuilder:
    """What makes the tree that a recipe's method asks for, with a decoder of this kind.

    Args:
        adaptive: Of `tree: adaptive`: how deep a tree is grown.

    Raises:
        UserError: The static paths are no tree.
    """
    stepwise = isinstance(decoder, StepwiseDecoder)
    if method.paths is not None:
        return StaticGrower(method.paths) if stepwise else StaticBuilder(method.paths)
    if method.best_first:
        if not stepwise:
            return BestFirstBuilder(method.nodes, method.branch, method.max_depth)
        # Where a level costs no forward, nothing is left out of it.
        beam = method.nodes if isinstance(decoder, OneForward) else method.branch
        return BestFirstGrower(method.nodes, method.branch, method.max_depth, adaptive, beam)
    return ChainGrower(method.max_depth) if stepwise else ChainBuilder(method.max_depth)


def _q_of_children(q: Tensor, shape: TreeShape) -> Tensor:
    """[G, V] by depth to [N, V] by parent. The rows of the deepest leaves repeat the last depth; nobody reads them."""
    depths = shape.depths_tensor.clamp_max(len(q) - 1)
    return q.index_select(0, depths.to(q.device))
