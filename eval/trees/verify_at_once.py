"""Verification of all nodes of a tree at once, on the device; what it decided is walked through on the host.

`verify.py` walks from the root and asks for one node after the other, so that the host waits for the device at each.
Here every node is decided as if the walk came to it: which child it accepts, and which token follows it otherwise.
Chance is drawn up front: a uniform for every draw, and a race of exponentials for every token (Gumbel-max).

What a node's child, or the target in its place, comes to is distributed as p at that node. So at T = 0, and for
children that were chosen deterministically, a token is drawn from p and followed if there is a child of that name: the
same as accepting x with p(x) and removing it. And a path that may go no deeper ends with a token that is exact too.

Shapes: N tree nodes, I of them with children, C children of a node at most, V vocabulary. p = target, q = drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.trees.candidates import drafted_nodes, without_blanks
from draftsmith.eval.trees.device_tree import DeviceTree
from draftsmith.eval.trees.sampling import Sampling, drawn, largest
from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.eval.trees.verify import Verdict, verify_greedy
from draftsmith.models.decoding.transfers import to_host


@dataclass(slots=True)
class Decided:
    """What came back from the device.

    tree: as the host would have made it, its q excepted; verdict: the path in it; places: the path's nodes in the tree
    that was run; nodes: all of the tree's there.
    """

    tree: DraftTree
    verdict: Verdict
    places: list[int]
    nodes: list[int]


def verify_at_once(
    tree: DeviceTree,
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Decided:
    """Accept a path of the tree; the host waits for the device once. As `verify`, without lenience.

    Args:
        logits: [N, V] of the target at every node.
        sampling: Applied to the target's logits; `tree.q` must have been standardised with the same one.
        generator: For temperatures > 0, of the logits' device.
    """
    accepted, following = decide(tree, logits, sampling, generator)
    parts = {
        "following": following,
        "accepted": accepted,
        "tokens": None if tree.host is not None else tree.tokens,
        "parents": tree.parents,
    }
    given = {name: part for name, part in parts.items() if part is not None}
    return walk_decided(tree, dict(zip(given, to_host(torch.stack(list(given.values()))), strict=True)))


def decide(
    tree: DeviceTree, logits: Tensor, sampling: Sampling, generator: torch.Generator | None
) -> tuple[Tensor | None, Tensor]:
    """[N] the child that each node accepts, -1 for none, and [N] the token that comes after it, the child's or another.

    Without q nothing is said of children: it is the one with that token, if there is one.
    """
    if sampling.greedy:
        return None, largest(logits)
    p_nv = sampling.probabilities(logits)
    if tree.q is None or tree.families is None:
        return None, drawn(p_nv, generator)
    accept_ic, p_nv = acceptance(tree, p_nv)
    uniform_ic = torch.rand(accept_ic.shape, generator=generator, device=p_nv.device, dtype=p_nv.dtype)
    hit_ic = uniform_ic < accept_ic
    child_i = tree.families.children.gather(-1, hit_ic.int().argmax(-1, keepdim=True))[:, 0]
    accepted = torch.full_like(tree.tokens, -1)
    accepted.index_copy_(0, tree.families.nodes, child_i.masked_fill(~hit_ic.any(-1), -1))
    return accepted, torch.where(accepted >= 0, tree.tokens[accepted.clamp_min(0)], drawn(p_nv, generator))


def acceptance(tree: DeviceTree, p_nv: Tensor) -> tuple[Tensor, Tensor]:
    """What chance decides by, of a tree with q.

    Returns:
        [I, C] the probability that a draw is accepted if those before it were not, 0 where there is none; [N, V] what
        the target contributes from where no draw is.
    """
    assert tree.q is not None
    assert tree.families is not None
    families, accept = tree.families, []
    p = p_nv.index_select(0, families.nodes)
    q = tree.q.to(p.dtype).index_select(0, families.rows[:, 0])
    for draw in range(families.children.shape[1]):
        child_i1 = families.children[:, draw, None]
        token_i1 = tree.tokens[child_i1.clamp_min(0)]
        drawn_i1 = (child_i1 >= 0) & (token_i1 >= 0)
        token_i1 = token_i1.clamp_min(0)
        if draw > 0 and tree.replaced:
            q = tree.q.to(p.dtype).index_select(0, families.rows[:, draw])
        # 1. Accept x with probability min(1, p(x) / q(x)).
        ratio_i1 = (p.gather(-1, token_i1) / q.gather(-1, token_i1)).clamp_max(1)
        accept.append(torch.where(drawn_i1, ratio_i1, 0.0))
        # 2. Rejected: what is left to sample from is p minus what q has covered already.
        p = torch.where(drawn_i1, _normalised((p - q).clamp_min(0), p), p)
        if not tree.replaced:
            # The next sibling was drawn from q without x.
            q = _normalised(q.scatter(-1, token_i1, 0.0), q)
    return torch.cat(accept, dim=-1), p_nv.index_copy(0, families.nodes, p)


def _normalised(left: Tensor, otherwise: Tensor) -> Tensor:
    """[I, V] distributions; where nothing is left, which has no probability, the others."""
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, otherwise)


def walk_decided(tree: DeviceTree, read: dict[str, list[int]]) -> Decided:
    """Follow what was decided from the root on.

    Args:
        read: [N] each: `following`, and `accepted`, `tokens` and `parents` where they were on the device alone.
    """
    host = tree.host
    if host is None:
        shape = tree.shape if tree.shape is not None else TreeShape.of(tuple(read["parents"]))
        host = DraftTree(read["tokens"], shape)
        if tree.max_depth is not None:
            host = host.cut_to_depth(tree.max_depth)
    following, accepted = read["following"], read.get("accepted")
    if accepted is None:
        path = verify_greedy(host, following).path
    else:
        path = [0]
        while (child := accepted[path[-1]]) >= 0:
            path.append(child)
    nodes = drafted_nodes(host)
    if len(nodes) == len(host):
        return Decided(host, Verdict(path, following[path[-1]]), path, nodes)
    number = {node: index for index, node in enumerate(nodes)}
    verdict = Verdict([number[node] for node in path], following[path[-1]])
    return Decided(without_blanks(host), verdict, path, nodes)
