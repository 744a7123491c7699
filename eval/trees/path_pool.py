"""The best tree of N nodes on a device, where the distribution at a depth does not depend on the path to it.

A path of ranks (r_1, ..., r_d) is at most as likely as every path of d or fewer places whose ranks are nowhere larger.
These are sum over k <= d of r_1 * ... * r_k with itself: if that is more than N, it can never be one of the N best.
The others are a pool that is known beforehand, from which each round takes the N likeliest, in a handful of kernels.

Shapes: M paths in the pool, G depths, b ranks at a depth (`branch`), N nodes without the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from draftsmith.eval.trees.device_tree import DeviceTree
from draftsmith.models.decoding.transfers import to_device

MOST_PATHS = 1 << 16


@dataclass(frozen=True)
class PathPool:
    """Paths level by level, so that each comes after all that it could be no better than.

    places: [M, G] of a path's ranks in log q [G, b], flattened, G * b behind its end; above: [M, G] of its prefixes in
    the pool, itself the last, M behind its end; parents: [M] of them, M for the root.
    """

    places: Tensor
    above: Tensor
    parents: Tensor

    def best(self, root: Tensor, tokens_gb: Tensor, log_q_gb: Tensor, nodes: int) -> DeviceTree:
        """The `nodes` likeliest paths under a root [1]; tokens without any probability become -1."""
        paths = len(self.places)
        log_q = torch.nn.functional.pad(log_q_gb.double().flatten(), (0, 1))
        scores = log_q[self.places].sum(-1)
        # Of equals the first stays, so a parent before its child: a step far below what fp32 tells apart.
        order = torch.arange(paths, device=scores.device)
        chosen = (scores - order * 1e-12).topk(min(nodes, paths), sorted=False).indices.sort().values
        drafted = len(chosen)
        # Node 0 is the root, and what stands for no path at all.
        number = torch.zeros(paths + 1, dtype=torch.int64, device=scores.device)
        number.index_copy_(0, chosen, torch.arange(1, drafted + 1, device=scores.device))
        above = number[self.above[chosen]]
        seen = torch.zeros(drafted + 1, drafted + 1, dtype=torch.bool, device=scores.device)
        seen[1:].scatter_(1, above, True)
        seen[:, 0] = True
        last = (self.above[chosen] < paths).sum(-1)
        place = self.places[chosen].gather(-1, last[:, None] - 1)[:, 0]
        log_q_of = scores[chosen]
        tokens = tokens_gb.flatten()[place].masked_fill(log_q_of == -torch.inf, -1)
        zero = torch.zeros(1, dtype=torch.int64, device=scores.device)
        return DeviceTree(
            torch.cat([root, tokens]),
            torch.cat([zero, last]),
            seen,
            parents=torch.cat([zero - 1, number[self.parents[chosen]]]),
            log_confidence=torch.cat([log_q_of.new_zeros(1), log_q_of]),
        )


@lru_cache(maxsize=64)
def path_pool(nodes: int, branch: int, depths: int, device: torch.device) -> PathPool | None:
    """What trees of so many nodes are made of; None: there are too many paths to hold."""
    level: list[tuple[tuple[int, ...], int, int, list[int]]] = [((), 1, 0, [])]  # ranks, product, sum, prefixes
    places: list[list[int]] = []
    above: list[list[int]] = []
    parents: list[int] = []
    for depth in range(depths):
        further = []
        for ranks, product, total, prefixes in level:
            for rank in range(1, branch + 1):
                if total + product * rank > nodes:
                    break
                own = [*prefixes, len(places)]
                path = (*ranks, rank)
                places.append(
                    [d * branch + r - 1 for d, r in enumerate(path)] + [depths * branch] * (depths - depth - 1)
                )
                above.append(own)
                parents.append(prefixes[-1] if prefixes else -1)
                further.append((path, product * rank, total + product * rank, own))
        level = further
        if len(places) > MOST_PATHS:
            return None
    count = len(places)
    padded = [own + [count] * (depths - len(own)) for own in above]
    return PathPool(
        to_device(places, device),
        to_device(padded, device),
        to_device([parent if parent >= 0 else count for parent in parents], device),
    )
