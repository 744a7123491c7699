"""The most likely paths under q, found on the device where the drafter's logits are, so that no host waits for them.

`PathSearch` is for drafters whose distribution at a depth does not depend on the path to it. A path of ranks r_1 to r_d
among the most likely tokens of each depth is at most as likely as all paths whose ranks are no larger, and as their
prefixes: sum_k prod_{i <= k} (r_i + 1) paths with itself. If these are more than N, the path is not needed for the N
best. The other paths, the candidates, are the same in every round. So a search is one sort of their confidences, and a
number of operations that depends neither on N nor on the depth.

`LevelSearch` is for the others, whose candidates are the children of the `beam` most confident nodes of each level: a
sort for every level, and one of all. All levels are drafted, as only the host could see that no deeper node can enter.

Shapes: G depths, V' columns of the logits, W rows of a level, K ranks, C candidates, N nodes after the root.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from itertools import accumulate, chain

import torch
from torch import Tensor

from draftsmith.eval.trees.verify import BITS, DeviceTokens, DraftTree, TreeShape
from draftsmith.models.decoding.decoders import LevelDecoder, TokenColumns
from draftsmith.models.decoding.kv_cache import to_device

MOST_NODES = BITS - 1  # besides the root


def candidate_paths(nodes: int, width: int, num_depths: int) -> list[tuple[int, ...]]:
    """List the paths of ranks below `width` that can be among the `nodes` most likely ones.

    They are in the order in which `BestFirstBuilder`'s heap finds paths that are equally likely.
    """
    paths: list[tuple[int, ...]] = []
    # Each path with the last term of its sum, and the sum.
    queue: deque[tuple[tuple[int, ...], int, int]] = deque([((0,), 1, 1)])
    while queue:
        path, term, total = queue.popleft()
        paths.append(path)
        step = term // (path[-1] + 1)
        if path[-1] + 1 < width and total + step <= nodes:
            queue.append(((*path[:-1], path[-1] + 1), term + step, total + step))
        if len(path) < num_depths and total + term <= nodes:
            queue.append(((*path, 0), term, total + term))
    return paths


class _Search:
    """Base of the searches: it chooses the best candidates and makes a tree of them.

    Args:
        nodes: At most `MOST_NODES`; as many as the candidates if these are fewer.
        deepest: The depth of the deepest candidates.
    """

    def __init__(self, nodes: int, candidates: int, deepest: int, device: torch.device) -> None:
        self._count = min(nodes, candidates)
        self._bits_n = 1 << torch.arange(1, self._count + 1, device=device)
        self._no_bits = torch.zeros(candidates + 1, dtype=torch.int64, device=device)  # the last is no candidate
        deepest = min(deepest, self._count)
        self._outline = TreeShape.of((-1, *range(deepest), *[0] * (self._count - deepest)))

    def _best(self, log_q_c: Tensor) -> tuple[Tensor, Tensor]:
        """Return log confidences and numbers [N] of the best candidates, of equal ones the first."""
        log_q_c, order_c = log_q_c.sort(descending=True, stable=True)
        return log_q_c[: self._count], order_c[: self._count]

    def _tree(
        self, root: int, log_q_n: Tensor, best_n: Tensor, paths_ng: Tensor, token_n: Tensor, depth_n: Tensor
    ) -> DraftTree:
        """Return the tree of the best candidates, given the candidates of the path to each."""
        bits = self._no_bits.index_copy(0, best_n, self._bits_n)
        # A drafter may leave tokens without any probability: such nodes do not see the root, and are not accepted.
        ancestors_n = bits[paths_ng].sum(-1) + (log_q_n > -math.inf)
        return DraftTree(DeviceTokens(root, torch.stack([token_n, depth_n, ancestors_n])), self._outline)


class PathSearch(_Search):
    """Search of the `nodes` most likely paths; see the module's docstring. `PathSearch.of` shares equal searches.

    Args:
        nodes: At most `MOST_NODES`.
        width: K, at most V'.
        device: The logits'.
    """

    def __init__(self, nodes: int, width: int, num_depths: int, device: torch.device) -> None:
        paths = candidate_paths(nodes, width, num_depths)
        number = {path: candidate for candidate, path in enumerate(paths)}
        deepest = max(map(len, paths))
        super().__init__(nodes, len(paths), deepest, device)
        self._width = width
        ranks_cg, rows = [], []
        for path in paths:
            # Of every depth of the path: where its log q is, and the path to it. Beyond: 0, and no candidate.
            missing = deepest - len(path)
            ranks = [depth * width + rank for depth, rank in enumerate(path)]
            prefixes = [number[path[: depth + 1]] for depth in range(len(path))]
            ranks_cg.append([*ranks, *[num_depths * width] * missing])
            rows.append([len(path), ranks[-1], *prefixes, *[len(paths)] * missing])
        self._ranks_cg, self._nodes_c = to_device(ranks_cg, device), to_device(rows, device)
        self._zero = torch.zeros(1, device=device)

    @staticmethod
    @lru_cache(maxsize=16)
    def of(nodes: int, width: int, num_depths: int, device: torch.device) -> PathSearch:
        return PathSearch(nodes, width, num_depths, device)

    def tree(self, root_token: int, logits_gv: Tensor, columns: TokenColumns) -> DraftTree:
        """Return the tree of the best paths in fp32 logits [G, V'], tokens and topology on their device."""
        top = logits_gv.topk(self._width, dim=-1)
        log_q = logits_gv.log_softmax(-1).gather(-1, top.indices)
        # Sums of few fp32 numbers are exact in fp64, so that equal ones are equal.
        log_q_c = torch.cat([log_q.flatten(), self._zero])[self._ranks_cg].sum(-1, dtype=torch.float64)
        log_q_n, best_n = self._best(log_q_c)  # a parent before its child
        node_n = self._nodes_c[best_n]
        token_n = columns.device_tokens(top.indices.flatten()[node_n[:, 1]])
        return self._tree(root_token, log_q_n, best_n, node_n[:, 2:], token_n, node_n[:, 0])


class LevelSearch(_Search):
    """Search of the `nodes` most likely candidates of a tree grown level by level; `LevelSearch.of` shares equal ones.

    Its nodes are the ones of `BestFirstGrower`'s tree, ordered by confidence: nodes without probability come last.

    Args:
        nodes: At most `MOST_NODES`.
        branch: K, at most V'.
        beam: Nodes of a level that get children.
        device: The logits'.
    """

    def __init__(self, nodes: int, branch: int, beam: int, num_depths: int, device: torch.device) -> None:
        widths = [1]
        # A level's nodes have ancestors that are as likely, and at least one child must fit too.
        while len(widths) < num_depths and nodes > len(widths):
            widths.append(min(beam, widths[-1] * branch, nodes - len(widths)))
        candidates, self.rows = sum(widths) * branch, sum(widths)
        super().__init__(nodes, candidates, len(widths), device)
        self._branch, self._widths = branch, widths
        # Of each candidate the row that it is a child of, which is the decoder's number of the node, and its depth.
        rows = [[row] * branch for row in range(self.rows)]
        depths = [[depth] * width * branch for depth, width in enumerate(widths, start=1)]
        self._row_c, self._depth_c = to_device([[*chain(*rows), 0], [*chain(*depths), 0]], device)
        # The candidate of the root's row is none; those of a level's rows are counted from the level's first.
        firsts = accumulate((width * branch for width in widths[:-1]), initial=0)
        offsets = [[first] * width for first, width in zip(firsts, widths[1:], strict=False)]
        self._offset_r = to_device([candidates, *chain(*offsets)], device)
        self._root_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._certain_1 = torch.zeros(1, dtype=torch.float64, device=device)

    @staticmethod
    @lru_cache(maxsize=16)
    def of(nodes: int, branch: int, beam: int, num_depths: int, device: torch.device) -> LevelSearch:
        return LevelSearch(nodes, branch, beam, num_depths, device)

    def tree(self, root_token: int, logits_wv: Tensor, decoder: LevelDecoder) -> DraftTree:
        """Return the tree that a decoder grows after `begin`, whose logits are given; all of it on the device."""
        log_q_w, first = self._certain_1, 0
        tokens, confidences, grown = list[Tensor](), list[Tensor](), [self._root_1]
        for width in [*self._widths[1:], 0]:
            top = logits_wv.topk(self._branch, dim=-1)
            log_q = logits_wv.log_softmax(-1).gather(-1, top.indices)
            tokens.append(decoder.columns.device_tokens(top.indices.flatten()))
            confidences.append((log_q_w[:, None] + log_q).flatten())
            if width:
                log_q_c, order_c = confidences[-1].sort(descending=True, stable=True)
                log_q_w, order_w = log_q_c[:width], order_c[:width]
                row_w = self._row_c[first:][order_w]
                logits_wv = decoder.expand_level(torch.stack([tokens[-1][order_w], row_w]))
                grown.append(order_w)
                first += len(order_c)
        log_q_n, best_n = self._best(torch.cat(confidences))
        above_c = (torch.cat(grown) + self._offset_r)[self._row_c]
        path = [best_n]
        for _ in self._widths[1:]:
            path.append(above_c[path[-1]])
        token_n, depth_n = torch.cat(tokens)[best_n], self._depth_c[best_n]
        return self._tree(root_token, log_q_n, best_n, torch.stack(path, dim=1), token_n, depth_n)
