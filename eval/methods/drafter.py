"""Draft trees from the logits of a drafter, trained or fitted.

If the drafter's distribution at a depth does not depend on the path to it (ParallelSpec, Medusa), `draft` builds the
tree from one forward. For the others (EAGLE, Hydra, Markov heads) `grow` builds it by one call per level. The trees,
by temperature:

    tree        T = 0                      T > 0
    chain       most likely token          sampled from q
    static      ranks of each path         siblings sampled from their parent's q without replacement
    best_first  the N most likely paths    the same, deterministic: verified as point masses, lossless too

Shapes: G drafted depths, R rows, W nodes of a level, V vocabulary, V' columns of the drafter's logits, N tree nodes, P
prompt, n newly committed tokens, F features.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.decoding.method import Method
from draftsmith.eval.trees.path_lookup import PathLookup, with_lookups
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.decoding.decoders import (
    ALL_TOKENS,
    DrafterDecoder,
    PathDecoder,
    SequenceDecoder,
    StepwiseDecoder,
    TokenColumns,
)
from draftsmith.models.decoding.kv_cache import to_device
from draftsmith.models.kernels.cpu_kernels import best_first, largest, most_likely
from draftsmith.models.sampling import Sampling, drawn, race
from draftsmith.recipes.schema import MethodConfig


def build_tree_drafter(
    recipe: MethodConfig,
    decoder: SequenceDecoder,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> TreeDrafter:
    """Build the method that drafts with `decoder`, in trees of the shape that `recipe`, one of `eval.methods`, sets.

    Raises:
        UserError: A path in `paths` is empty, repeated or negative, or its parent path is missing.
    """
    lookup_nodes = recipe.nodes if recipe.lookup else 0
    return TreeDrafter(recipe.name, decoder, tree_builder(recipe), sampling, generator, lookup_nodes)


class TreeDrafter(Method):
    """Method that drafts a chain or a tree with a drafter in every round.

    Args:
        builder: Shape of the draft trees, see `tree_builder`.
        sampling: Temperature, top-k and top-p of the target; the drafter's q is computed with the same ones.
        lookup_nodes: Size of a best-first tree that may also have tokens that `PathLookup` finds; 0: no lookups.
    """

    def __init__(
        self,
        name: str,
        decoder: SequenceDecoder,
        builder: TreeBuilder,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        lookup_nodes: int = 0,
    ) -> None:
        self.name = name
        # A lookup finds any token.
        self.columns = ALL_TOKENS if lookup_nodes else decoder.columns
        self._lookup = PathLookup(sampling.temperature) if lookup_nodes else None
        self._lookup_nodes = lookup_nodes
        self.decoder, self._sampling, self._generator = decoder, sampling, generator
        self._build: Callable[..., DraftTree] = builder.grow if isinstance(decoder, StepwiseDecoder) else builder.draft

    def start(self, prompt_ids: list[int], features: Tensor) -> None:
        if self._lookup is not None:
            self._lookup.start(prompt_ids)
        self.decoder.start(to_device(prompt_ids, features.device), features)

    def propose(self) -> DraftTree:
        tree = self._build(self._newest, self.decoder, self._sampling, self._generator)
        if self._lookup is not None:
            tree = with_lookups(tree, self._lookup, self._lookup_nodes)
        return tree

    def observe(self, committed_ids: list[int], features: Tensor) -> None:
        super().observe(committed_ids, features)
        if self._lookup is not None:
            self._lookup.observe(committed_ids)
        self.decoder.observe(to_device(committed_ids, features.device), features)


# ---- how a tree is made: from one forward (`draft`), or level by level (`grow`) ----


def tree_builder(method: MethodConfig) -> TreeBuilder:
    """Return the builder of draft trees (chain, static or best-first) that a method in a recipe chooses.

    Raises:
        UserError: A path in `paths` is empty, repeated or negative, or its parent path is missing.
    """
    if method.paths is not None:
        return Static(method.paths)
    if method.tree == "best_first":
        return BestFirst(method.nodes, method.branch, method.max_depth)
    return Chain(method.max_depth)


@dataclass(frozen=True)
class Chain:
    """Builder of chains: one draft token per depth, down to `max_depth` (None: all depths of the drafter)."""

    max_depth: int | None = None

    def draft(
        self, root_token: int, decoder: DrafterDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        logits_gv, columns = decoder.draft()[: self.max_depth], decoder.columns
        shape = TreeShape.chain(len(logits_gv))
        if sampling.greedy:
            return DraftTree.of_drafted(root_token, columns.device_tokens(largest(logits_gv)), shape)
        q_gv = sampling.probabilities(logits_gv)
        drafted, q = columns.device_tokens(drawn(q_gv, generator)), columns.widened(q_gv, 0.0)
        return DraftTree.of_drafted(root_token, drafted, shape, _q_of_children(q, shape))

    def grow(
        self, root_token: int, decoder: StepwiseDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """Draft a chain by one forward of the drafter per token, which reads the token before."""
        num_depths, columns = min(decoder.num_depths, self.max_depth or decoder.num_depths), decoder.columns
        logits = decoder.begin()
        q_rows: list[Tensor] = []
        drafted: list[Tensor] = []  # one token for every depth
        for depth in range(num_depths):
            if depth > 0:
                logits = decoder.expand(drafted[-1], [depth - 1])
            if not sampling.greedy:
                q_rows.append(sampling.probabilities(logits))
            chosen = largest(logits) if sampling.greedy else drawn(q_rows[-1], generator)
            drafted.append(columns.device_tokens(chosen))
        # The leaf's row is not read.
        q = None if sampling.greedy else columns.widened(torch.cat([*q_rows, q_rows[-1]]), 0.0)
        return DraftTree.of_drafted(root_token, torch.cat(drafted), TreeShape.chain(num_depths), q)


class Static:
    """Builder of a fixed tree from Medusa's paths, lists of token ranks ([0], [1], [0, 0]; arXiv 2401.10774, 2.3).

    Raises:
        UserError: A path is empty, repeated or negative, or its parent path is missing.
    """

    def __init__(self, paths: list[list[int]]) -> None:
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
        self._ranks = [0, *(path[-1] for path in ordered)]  # [N], among the parent's most likely tokens
        # The nodes with children, by depth.
        self._levels: list[list[int]] = [[] for _ in range(self._shape.max_depth)]
        for node, children in enumerate(self._shape.children):
            if children:
                self._levels[self._shape.depths[node]].append(node)

    def draft(
        self, root_token: int, decoder: DrafterDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        logits_gv, columns, shape = decoder.draft(), decoder.columns, self._shape
        self._check(*logits_gv.shape)
        logits_gv = logits_gv[: shape.max_depth]
        if sampling.greedy:
            width, nodes = max(self._ranks) + 1, zip(shape.depths[1:], self._ranks[1:], strict=True)
            drafted = _chosen(logits_gv, width, [(depth - 1) * width + rank for depth, rank in nodes])
            return DraftTree.of_drafted(root_token, columns.device_tokens(drafted), shape)
        # All parents at a depth may share the draws: what happens at one of them never depends on the draws of another
        # depth.
        q_gv = sampling.probabilities(logits_gv)
        candidates = draw_without_replacement(q_gv, max(map(len, shape.children)), generator, columns)
        tokens = [root_token] + [-1] * (len(shape) - 1)
        for parent, children in enumerate(shape.children):
            for child, token in zip(children, candidates[min(shape.depths[parent], len(candidates) - 1)], strict=False):
                tokens[child] = token
        return without_blanks(DraftTree(tokens, shape, _q_of_children(columns.widened(q_gv, 0.0), shape)))

    def grow(
        self, root_token: int, decoder: StepwiseDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        shape, columns = self._shape, decoder.columns
        logits = decoder.begin()
        self._check(decoder.num_depths, logits.shape[-1])
        if sampling.greedy:
            return self._grow_most_likely(root_token, decoder, logits)
        tokens = [root_token] + [-1] * (len(shape) - 1)
        decoder_index: dict[int, int] = {}  # the decoder's number of a node, which is also its row of q
        q_rows: list[Tensor] = []
        for depth, level in enumerate(self._levels):
            # Nodes without a token have no children.
            grown = [node for node in level if tokens[node] >= 0]
            if not grown:
                break
            if depth > 0:
                above = [decoder_index[shape.parents[node]] for node in grown]
                logits = decoder.expand([tokens[node] for node in grown], above)
            q_rows.append(sampling.probabilities(logits))
            width = max(len(shape.children[node]) for node in grown)
            candidates = draw_without_replacement(q_rows[-1], width, generator, columns)
            for node, row in zip(grown, candidates, strict=True):
                decoder_index[node] = len(decoder_index)
                for child, token in zip(shape.children[node], row, strict=False):
                    tokens[child] = token
        # The rows of leaves are not read.
        rows = to_device([decoder_index.get(node, 0) for node in range(len(shape))], q_rows[0].device)
        q = columns.widened(torch.cat(q_rows), 0.0)
        return without_blanks(DraftTree(tokens, shape, q.index_select(0, rows)))

    def _grow_most_likely(self, root_token: int, decoder: StepwiseDecoder, logits: Tensor) -> DraftTree:
        """Grow the most likely tree without a wait: the ranks of a level's tokens do not depend on the tokens."""
        shape, ranks = self._shape, self._ranks
        drafted: list[Tensor] = []
        decoder_index = {node: number for number, node in enumerate(itertools.chain(*self._levels))}
        for depth, level in enumerate(self._levels):
            if depth > 0:
                first = shape.depths.index(depth)
                grown = to_device([node - first for node in level], logits.device)
                above = [decoder_index[shape.parents[node]] for node in level]
                logits = decoder.expand(drafted[-1].index_select(0, grown), above)
            children = [(row, ranks[child]) for row, node in enumerate(level) for child in shape.children[node]]
            width = 1 + max(rank for _, rank in children)
            chosen = _chosen(logits, width, [row * width + rank for row, rank in children])
            drafted.append(decoder.columns.device_tokens(chosen))
        return DraftTree.of_drafted(root_token, torch.cat(drafted), shape)

    def _check(self, num_depths: int, vocabulary: int) -> None:
        depth, width = self._shape.max_depth, max(self._ranks) + 1
        if depth > num_depths or width > vocabulary:
            raise UserError(
                f"the static tree is {depth} deep and {width} wide, but the drafter drafts {num_depths} tokens "
                f"of a vocabulary of {vocabulary}: shorten `paths`, or train a drafter of more depths"
            )


@dataclass(frozen=True)
class BestFirst:
    """Builder of trees of the `nodes` most likely paths under q, the root not counted: the best tree of that size.

    Level by level it is EAGLE-2's dynamic tree (arXiv 2406.16858, section 4):

    1. Expansion: at every depth the `branch` most confident new nodes get their `branch` most likely children. The
       confidence of a node is the probability of the path to it under q. If a level costs no forward (`PathDecoder`),
       all nodes are expanded, which gives the best tree under q.
    2. Reranking: the `nodes` most confident of all candidates stay.

    We rerank after every depth instead of once. The tree is the same, as nothing below a node is more confident than
    the node; but nodes that cannot stay are not expanded, and the tree is complete once no deeper node can enter it.

    Args:
        branch: Number of the most likely tokens of a depth, or of children of a node.
    """

    nodes: int
    branch: int
    max_depth: int | None = None

    def draft(
        self, root_token: int, decoder: DrafterDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        logits_gv = decoder.draft()[: self.max_depth]
        scaled_gv = logits_gv if sampling.greedy else sampling.scaled(logits_gv)
        drafted, parents, log_confidence = best_first(scaled_gv, self.branch, self.nodes)
        tokens = [root_token, *decoder.columns.tokens(drafted)]
        return DraftTree(tokens, TreeShape.of((-1, *parents)), log_confidence=[0.0, *log_confidence])

    def grow(
        self, root_token: int, decoder: StepwiseDecoder, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        # Candidates in the order of arrival, the root being 0; cost = -log of the confidence.
        tokens, parents, costs = [root_token], [-1], [0.0]
        decoder_index = {0: 0}  # the decoder's number of a candidate
        best: list[int] = []
        frontier, beam = [0], self.nodes if isinstance(decoder, PathDecoder) else self.branch
        num_depths = min(decoder.num_depths, self.max_depth or decoder.num_depths)
        logits = decoder.begin()
        for depth in range(num_depths):
            if depth > 0:
                above = [decoder_index[parents[node]] for node in frontier]
                logits = decoder.expand([tokens[node] for node in frontier], above)
                for node in frontier:
                    decoder_index[node] = len(decoder_index)
            # 1. Expansion.
            first_new = len(tokens)
            scaled = logits if sampling.greedy else sampling.scaled(logits)
            for node, row, row_log_q in zip(frontier, *most_likely(scaled, self.branch), strict=True):
                for token, log_q in zip(decoder.columns.tokens(row), row_log_q, strict=True):
                    # A drafter may leave tokens without any probability.
                    if log_q > -math.inf:
                        tokens.append(token)
                        parents.append(node)
                        costs.append(costs[node] - log_q)
            # 2. Reranking. The sort is stable: of equals the first to arrive stays, so a parent before its child.
            best = sorted([*best, *range(first_new, len(tokens))], key=costs.__getitem__)[: self.nodes]
            # Nothing can enter below the last of a full list.
            frontier = [node for node in best[: self.nodes - 1] if node >= first_new][:beam]
            if not frontier:
                break
        # In the order of arrival: level by level, so that shapes recur.
        nodes = [0, *sorted(best)]
        shape = TreeShape.from_nodes(nodes, parents)
        return DraftTree([tokens[node] for node in nodes], shape, log_confidence=[-costs[node] for node in nodes])


TreeBuilder = Chain | Static | BestFirst


# ---- tokens of a level, from logits or q over a drafter's columns ----


def _chosen(logits: Tensor, width: int, places: list[int]) -> Tensor:
    """Return the columns at some places of the `width` most likely ones of all rows, in one row, on the device."""
    return logits.topk(width, dim=-1).indices.flatten().index_select(0, to_device(places, logits.device))


def draw_without_replacement(
    q: Tensor, count: int, generator: torch.Generator | None, columns: TokenColumns = ALL_TOKENS
) -> list[list[int]]:
    """Draw `count` different token ids from each row of q [R, V'], in the order drawn; -1 if q has fewer."""
    # The order of q / Exp(1) is the order of draws without replacement.
    order = race(q, generator).topk(min(count, q.shape[-1]), dim=-1).indices
    return _to_token_lists(order.masked_fill(q.gather(-1, order) <= 0, -1), count, columns)


def draw_independently(
    q: Tensor, count: int, generator: torch.Generator | None, columns: TokenColumns = ALL_TOKENS
) -> list[list[int]]:
    """Draw `count` token ids from each row of q [R, V'], with replacement."""
    return _to_token_lists(torch.multinomial(q, count, replacement=True, generator=generator), count, columns)


def _to_token_lists(chosen: Tensor, count: int, columns: TokenColumns) -> list[list[int]]:
    """Convert columns [R, n] to `count` token ids per row, with -1 for missing ones."""
    missing = [-1] * (count - chosen.shape[-1])
    return [columns.tokens(row) + missing for row in chosen.tolist()]


def without_blanks(tree: DraftTree) -> DraftTree:
    """Return the tree without nodes of token -1 (q had fewer tokens than siblings) and the nodes below them."""
    if -1 not in tree.tokens:
        return tree
    remaining = {-1}
    for node, token in enumerate(tree.tokens):
        if token >= 0 and tree.parents[node] in remaining:
            remaining.add(node)
    return tree.cut_to(sorted(remaining - {-1}))


def _q_of_children(q_gv: Tensor, shape: TreeShape) -> Tensor:
    """Expand q [G, V] by depth to [N, V] by parent node; leaves at the last depth get a row that is not read."""
    last = len(q_gv) - 1
    return q_gv.index_select(0, to_device([min(depth, last) for depth in shape.depths], q_gv.device))
