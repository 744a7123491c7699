"""The most likely paths under q, found on the device where the drafter's logits are, so that no host waits for them.

For drafters whose distribution at a depth does not depend on the path to it. A path of ranks r_1 ... r_d (among the
most likely tokens of each depth) is at most as likely as all paths whose ranks are no larger, and as their prefixes:
sum_k prod_{i <= k} (r_i + 1) paths with itself. If these are more than N, the path is not needed for the N best. The
other paths, the candidates, are the same in every round. So a search is one sort of their confidences, and a number of
operations that depends neither on N nor on the depth.

Shapes: G depths, V' columns of the logits, W ranks, C candidates, N nodes after the root.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache

import torch
from torch import Tensor

from draftsmith.eval.trees.verify import BITS, DeviceTokens, DraftTree, TreeShape
from draftsmith.models.decoding.decoders import TokenColumns
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


class PathSearch:
    """Search of the `nodes` most likely paths; see the module's docstring. `PathSearch.of` shares equal searches.

    Args:
        nodes: At most `MOST_NODES`.
        width: W, at most V'.
        device: The logits'.
    """

    def __init__(self, nodes: int, width: int, num_depths: int, device: torch.device) -> None:
        paths = candidate_paths(nodes, width, num_depths)
        number = {path: candidate for candidate, path in enumerate(paths)}
        self.nodes, self._width = min(nodes, len(paths)), width
        deepest = max(map(len, paths))
        ranks_cg, rows = [], []
        for path in paths:
            # Of every depth of the path: where its log q is, and the path to it. Beyond: 0, and a path in no tree.
            missing = deepest - len(path)
            ranks = [depth * width + rank for depth, rank in enumerate(path)]
            prefixes = [number[path[: depth + 1]] for depth in range(len(path))]
            ranks_cg.append([*ranks, *[num_depths * width] * missing])
            rows.append([len(path), ranks[-1], *prefixes, *[len(paths)] * missing])
        self._ranks_cg, self._nodes_c = to_device(ranks_cg, device), to_device(rows, device)
        self._zero = torch.zeros(1, device=device)
        self._bits_n = 1 << torch.arange(1, self.nodes + 1, device=device)
        self._no_bits = torch.zeros(len(paths) + 1, dtype=torch.int64, device=device)
        # As deep as any tree can be.
        chain = min(deepest, self.nodes)
        self._outline = TreeShape.of((-1, *range(chain), *[0] * (self.nodes - chain)))

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
        # Stable: of equally likely paths the first ones, so a parent before its child.
        log_q_c, order_c = log_q_c.sort(descending=True, stable=True)
        best_n = order_c[: self.nodes]
        node_n = self._nodes_c[best_n]
        bits = self._no_bits.index_copy(0, best_n, self._bits_n)
        # A drafter may leave tokens without any probability: such nodes do not see the root, and are not accepted.
        ancestors_n = bits[node_n[:, 2:]].sum(-1) + (log_q_c[: self.nodes] > -math.inf)
        token_n = columns.device_tokens(top.indices.flatten()[node_n[:, 1]])
        rows = torch.stack([token_n, node_n[:, 0], ancestors_n])
        return DraftTree(DeviceTokens(root_token, rows), self._outline)
