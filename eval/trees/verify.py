"""Draft trees and their verification: the path that the target accepts, and the token that it adds itself.

A tree's node 0 is the root, the last committed token, which the target has not processed yet; all others are draft
tokens. A node's ancestors come before it, so that a prefix of the nodes is a tree too (SpecInfer, arXiv 2305.09781,
section 4). The tree's shape decides the attention mask, the positions and the paths.

Verification is ParallelSpec's (arXiv 2410.05589) Algorithm 1: Leviathan et al. (2211.17192) for one child; SpecInfer's
Algorithm 2 for several children, drawn independently by one drafter or several, or *without* replacement by one.
Temperature, top-k and top-p turn logits into the distribution that tokens are drawn from, in the same way for p and
for q, before the two are compared (Leviathan et al., 2.2).

It is lossless, unless lenience is below 1 (Leviathan et al., appendix A.5): q is multiplied by it in the comparison
with p; the residual stays the same. Then no token is more likely than p / lenience; nothing else is guaranteed.

Pure: no model and no cache. All randomness goes through a `Chooser`, so that `enumeration.py` can run this very code
for every outcome. On a GPU the host waits once for the result of a greedy tree or of a sampled chain, which is decided
at all nodes in one pass. In other trees only the nodes on the path are read: the host waits once for each of them if
the tree is deterministic, else for each tried draw and for the last token, 10 to 20 us each. A CPU has no such waits,
and one pass would be many times the work: it would draw, or sort for top-p, at every node.

Shapes: N tree nodes (root included), V vocabulary. p = target, q = drafter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.models.decoding.kv_cache import to_device
from draftsmith.models.kernels.cpu_kernels import largest
from draftsmith.models.sampling import Sampling, drawn

# ---- the draft tree ----


class TreeShape:
    """Topology of a draft tree: the parent of every node. Immutable; `TreeShape.of` shares equal shapes.

    Args:
        parents: [N], -1 for the root.
        num_candidates: Nodes from this index on are run through the target but never accepted, and are in no node's
            `children`. None: all nodes may be accepted.

    Raises:
        ValueError: The first node is no root, or a parent does not come before its child.
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
        self.draft_depth = max(depths[:num_candidates])  # of the nodes that may be accepted

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(parents: tuple[int, ...], num_candidates: int | None = None) -> TreeShape:
        return TreeShape(parents, num_candidates)

    @staticmethod
    def chain(num_drafted: int) -> TreeShape:
        """Return the shape of a chain: the root and `num_drafted` draft tokens, each below the one before."""
        return TreeShape.of(tuple(range(-1, num_drafted)))

    @staticmethod
    def from_nodes(nodes: Sequence[int], parents: Sequence[int], num_candidates: int | None = None) -> TreeShape:
        """Return the shape of the subtree of `nodes`, which must be ascending and include all their parents.

        `parents` and `num_candidates` are those of the whole tree.
        """
        new_index = {-1: -1} | {node: index for index, node in enumerate(nodes)}
        new_parents = tuple(new_index[parents[node]] for node in nodes)
        if num_candidates is None:
            return TreeShape.of(new_parents)
        return TreeShape.of(new_parents, sum(node < num_candidates for node in nodes))

    def __len__(self) -> int:
        return len(self.parents)

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


@dataclass(slots=True)
class DraftTree:
    """A draft tree: a token for every node of a shape.

    Args:
        tokens: [N] token ids; tokens[0] is the last committed token. Only tokens[0] until `drafted` is read.
        shape: The topology.
        q: [N, V], or None. Row u is the distribution that the children of node u were drawn from, without replacement
            and in node order (rows of leaves are never read). None: the children were chosen deterministically.
        draws: [N] lists, or None. For children drawn independently (by several drafters, or with replacement): each
            node's draws in order, as (child, row of q). q is [R, V] then, and a child drawn twice is listed twice.
        log_confidence: [N], or None if the builder does not know it. The drafter's log probability of the path to each
            node: the N' best nodes are the best tree of N' nodes.
        drafted: [N-1] int64 on a GPU, the tokens after the root, until `read` copies them; None: `tokens` has them.

    Raises:
        ValueError: The tokens do not fit the shape, or a sampled tree that is no chain has tokens on a GPU.
    """

    tokens: list[int]
    shape: TreeShape
    q: Tensor | None = None
    log_confidence: list[float] | None = None
    draws: list[list[tuple[int, int]]] | None = None
    drafted: Tensor | None = None

    def __post_init__(self) -> None:
        num_tokens = len(self.tokens) + (0 if self.drafted is None else len(self.drafted))
        if num_tokens != len(self.shape):
            raise ValueError(f"{num_tokens} tokens do not fit a tree of {len(self.shape)} nodes")
        if self.q is not None and self.drafted is not None and self.shape.max_depth + 1 != len(self):
            raise ValueError("a sampled tree that is no chain needs its tokens on the host: pass `tokens`")

    @staticmethod
    def of_drafted(root_token: int, drafted: Tensor, shape: TreeShape, q: Tensor | None = None) -> DraftTree:
        """Return the tree of a root token and its draft tokens [N-1]; tokens on a GPU stay there until `read`."""
        if drafted.device.type == "cpu":
            return DraftTree([root_token, *drafted.tolist()], shape, q)
        return DraftTree([root_token], shape, q, drafted=drafted)

    def read(self, numbers: Tensor) -> list[int]:
        """Copy int64 `numbers` [m] to the host and return them; the draft tokens are copied in the same wait."""
        if self.drafted is None:
            return numbers.tolist()
        drafted = len(self.drafted)
        known = torch.cat([self.drafted, numbers]).tolist()
        self.tokens, self.drafted = [*self.tokens, *known[:drafted]], None
        return known[drafted:]

    def __len__(self) -> int:
        return len(self.shape)

    @property
    def parents(self) -> tuple[int, ...]:
        """Return the parent of each of the N nodes, -1 for the root."""
        return self.shape.parents

    @property
    def depths(self) -> tuple[int, ...]:
        """Return the depth of each of the N nodes, 0 for the root."""
        return self.shape.depths

    def children(self, node: int) -> tuple[int, ...]:
        return self.shape.children[node]

    def cut_to_depth(self, max_depth: int) -> DraftTree:
        """Return the tree without the nodes deeper than `max_depth`."""
        if self.shape.max_depth <= max_depth:
            return self
        return self.cut_to([node for node, depth in enumerate(self.depths) if depth <= max_depth])

    def cut_to(self, nodes: list[int]) -> DraftTree:
        """Return the subtree of `nodes`, which must be ascending and include all their parents."""
        if len(nodes) == len(self):
            return self
        shape, drafted = TreeShape.from_nodes(nodes, self.parents, self.shape.num_candidates), self.drafted
        if drafted is None:
            tokens = [self.tokens[node] for node in nodes]
        else:
            tokens = self.tokens
            drafted = drafted.index_select(0, to_device([node - 1 for node in nodes[1:]], drafted.device))
        confidence = None if self.log_confidence is None else [self.log_confidence[node] for node in nodes]
        if self.draws is None:
            q = None if self.q is None else self.q.index_select(0, to_device(nodes, self.q.device))
            return DraftTree(tokens, shape, q, confidence, drafted=drafted)
        new_index = {node: index for index, node in enumerate(nodes)}
        draws = [[(new_index[child], row) for child, row in self.draws[node] if child in new_index] for node in nodes]
        return DraftTree(tokens, shape, self.q, confidence, draws)


def root_only(token: int) -> DraftTree:
    """Return a tree of the root token alone, without draft tokens: its round is one autoregressive step."""
    return DraftTree([token], TreeShape.chain(0))


# ---- verification ----


@dataclass(slots=True)
class Verification:
    """Result of verifying a draft tree.

    path: [a+1] nodes, the root and the a accepted draft nodes. next_token: the token that the target adds after them.
    """

    path: list[int]
    next_token: int

    def committed(self, tree: DraftTree) -> list[int]:
        """Return the a+1 tokens that the round adds to the sequence: a accepted draft tokens, then the target's own."""
        return [*(tree.tokens[node] for node in self.path[1:]), self.next_token]


class Chooser(Protocol):
    """Source of the random choices in verification. Probabilities and results are on the logits' device."""

    def accept(self, probabilities: Tensor) -> Tensor:
        """Return bools in the shape of `probabilities`, each True with its probability."""

    def draw(self, probabilities: Tensor) -> Tensor:
        """Draw one token id, int64 [], from a distribution [V]."""


class RandomChooser:
    """`Chooser` that draws from a torch.Generator; None: torch's global one."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator

    def accept(self, probabilities: Tensor) -> Tensor:
        return torch.rand(probabilities.shape, generator=self._generator, device=probabilities.device) < probabilities

    def draw(self, probabilities: Tensor) -> Tensor:
        return drawn(probabilities, self._generator)


def verify(
    tree: DraftTree,
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    lenience: float = 1.0,
) -> Verification:
    """Verify a draft tree: return the path that the target accepts, and the token that it adds after it.

    Args:
        logits: [N, V] of the target at every node.
        sampling: Sampling to apply to the target's logits; `tree.q` must have been computed with the same one.
        lenience: In (0, 1]. 1 is lossless; with less, more draft tokens are accepted.
    """
    if not sampling.greedy:
        return walk(tree, logits, sampling, RandomChooser(generator), lenience)
    best = tree.read(largest(logits))
    if lenience == 1:
        return follow(tree, best.__getitem__)

    def choose(node: int) -> int:
        """Return the likeliest child x with p(x) >= lenience max p, p at temperature 1 (A.5); else the target's."""
        row, largest_token = logits[node].float(), best[node]
        drafted = max((tree.tokens[child] for child in tree.children(node)), key=row.__getitem__, default=largest_token)
        # p(x) / max p = exp(logit(x) - largest logit)
        return drafted if row[drafted] >= row[largest_token] + math.log(lenience) else largest_token

    return follow(tree, choose)


def follow(tree: DraftTree, choose: Callable[[int], int]) -> Verification:
    """Follow from the root the children that have the target's token at their parent, which `choose` returns."""
    tokens, children = tree.tokens, tree.shape.children
    path = [0]
    while True:
        next_token = choose(path[-1])
        for child in children[path[-1]]:
            if tokens[child] == next_token:
                path.append(child)
                break
        else:
            return Verification(path, next_token)


def walk(tree: DraftTree, logits: Tensor, sampling: Sampling, chooser: Chooser, lenience: float = 1.0) -> Verification:
    """Verify the tree by rejection sampling, from the root down. Arguments as in `verify`.

    If q is a point mass, a child x is accepted with probability p(x); otherwise p without x remains (Leviathan et al.).
    Drawing one token from p, and following the child that has it, gives the same distribution.
    """
    if tree.q is None and lenience == 1:
        return follow(tree, lambda node: int(chooser.draw(sampling.probabilities(logits[node]))))
    if tree.drafted is not None and tree.q is not None:
        return _walk_chain(tree, tree.drafted, tree.q, logits, sampling, chooser, lenience)
    path = [0]
    while True:
        node = path[-1]
        p = sampling.probabilities(logits[node])
        for child, q in draws_below(tree, node, p.dtype):
            token = tree.tokens[child]
            # 1. Accept x with probability min(1, p(x) / (l q(x))), where l is the lenience; for a deterministic child q
            # is the point mass on it.
            p_token = p[token].double()
            q_token = 1.0 if q is None else q[token].double()
            if chooser.accept((p_token / (lenience * q_token)).clamp_max(1.0)):
                path.append(child)
                break
            # 2. Rejected: continue with the residual, norm(max(p - q, 0)).
            p = _residual(p, q, token)
        else:
            # 3. No child left: the target adds a token drawn from the residual.
            return Verification(path, int(chooser.draw(p)))


def _walk_chain(
    tree: DraftTree,
    drafted_g: Tensor,
    q_nv: Tensor,
    logits: Tensor,
    sampling: Sampling,
    chooser: Chooser,
    lenience: float,
) -> Verification:
    """Verify a sampled chain as `walk` does, but all nodes in one pass, so that the host waits once."""
    drafted_g1 = drafted_g[:, None]
    p_nv = sampling.probabilities(logits)
    q_nv = q_nv.to(p_nv.dtype)
    # 1. Of every node as in `walk`; the first rejection ends the path.
    p_g, q_g = (part[: len(drafted_g1)].gather(1, drafted_g1)[:, 0].double() for part in (p_nv, q_nv))
    accepted_g = chooser.accept((p_g / (lenience * q_g)).clamp_max(1.0))
    length_1 = accepted_g.long().cumprod(0).sum(0, keepdim=True)
    # 2. and 3. The residual at the path's end, or p if nothing was rejected.
    p_v, q_v = (part.index_select(0, length_1)[0] for part in (p_nv, q_nv))
    next_1 = chooser.draw(torch.where(length_1 < len(drafted_g1), _residual(p_v, q_v, -1), p_v)).view(1)
    length, next_token = tree.read(torch.cat([length_1, next_1]))
    return Verification(list(range(length + 1)), next_token)


def draws_below(tree: DraftTree, node: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor | None]]:
    """Yield (child, q [V]) of each draw below a node, in the order they are tried; q None: chosen, not drawn."""
    if tree.q is None:
        for child in tree.children(node):
            yield child, None
    elif tree.draws is not None:
        for child, row in tree.draws[node]:
            yield child, tree.q[row].to(dtype)
    elif children := tree.children(node):
        q = tree.q[node].to(dtype)
        for child in children:
            yield child, q
            # The next sibling was drawn from q without x.
            q = _without(q, tree.tokens[child])


def _residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """Return norm(max(p - q, 0)) of [V] distributions; q None: the point mass on `token`."""
    if q is None:
        return _without(p, token)
    left = (p - q).clamp_min(0)
    mass = left.sum()
    # p = q up to rounding: a rejection then has probability 0, and any result keeps the distribution.
    return torch.where(mass > 0, left / mass, p)


def _without(distribution: Tensor, token: int) -> Tensor:
    """Return the distribution [V] without one token, renormalised."""
    left = distribution.clone()
    left[token : token + 1].zero_()
    mass = left.sum()
    return torch.where(mass > 0, left / mass, distribution)
