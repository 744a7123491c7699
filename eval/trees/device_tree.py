"""A draft tree on the device: its tokens, and what chance will need, before anybody on the host has read them.

Trees of a known shape (chains, static trees) have constants there that are made once; a best-first tree has its parents
there too. Nodes come level by level: of two nodes the deeper one never comes first.

Shapes: N tree nodes, I of them with children, C children of a node at most, R rows of q, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.models.decoding.transfers import to_device

MOST_SHAPES = 4096  # whose constants are kept


@dataclass(frozen=True)
class Families:
    """The nodes with children, and their draws in the order in which they are tried.

    nodes: [I]; children: [I, C], -1 for none; rows: [I, C], of q.
    """

    nodes: Tensor
    children: Tensor
    rows: Tensor


@dataclass(frozen=True)
class DeviceTree:
    """See the module's docstring.

    Args:
        tokens: [N] int64, the root's first; -1: nothing was left to draft there.
        depths: [N] int64.
        seen: [N, N] bool: row u is true at u and at u's ancestors.
        shape: None where it is on the device alone.
        parents: [N] int64, where there is no shape.
        q: [R, V] in the order of `families.rows`, or None: the children were chosen deterministically.
        families: Where there is q.
        replaced: Whether siblings were drawn with replacement.
        log_confidence: [N] where a builder knows it, see `DraftTree`.
        host: The same tree, where the host made it.
        max_depth: Of the path that may be accepted, where it is not the tree's own.
    """

    tokens: Tensor
    depths: Tensor
    seen: Tensor
    shape: TreeShape | None = None
    parents: Tensor | None = None
    q: Tensor | None = None
    families: Families | None = None
    replaced: bool = False
    log_confidence: Tensor | None = None
    host: DraftTree | None = None
    max_depth: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def shaped(tokens: Tensor, shape: TreeShape, q: Tensor | None = None) -> DeviceTree:
        """Tokens [N] in a shape known beforehand; q [I, V] of its nodes with children, in order."""
        constants = shape_on(shape, tokens.device)
        families = None if q is None else constants.families
        return DeviceTree(tokens, constants.depths, constants.seen, shape, q=q, families=families)

    @staticmethod
    def of(tree: DraftTree, device: torch.device) -> DeviceTree:
        """A tree that the host made, in one copy where it is a chain or deterministic."""
        shape, nodes = tree.shape, len(tree)
        if tree.q is not None:
            draws = tree.draws or [[(child, node) for child in shape.children[node]] for node in range(nodes)]
            if not any(draws):
                return DeviceTree.of(DraftTree(tree.tokens, shape), device)
            families = _families(draws, device)
            replaced = tree.draws is not None
            constants = shape_on(shape, device)
            tokens = to_device(tree.tokens, device)
            return DeviceTree(
                tokens, constants.depths, constants.seen, shape, None, tree.q, families, replaced, host=tree
            )
        if shape.is_chain:
            constants = shape_on(shape, device)
            return DeviceTree(to_device(tree.tokens, device), constants.depths, constants.seen, shape, host=tree)
        # Shapes of such trees hardly recur.
        packed = to_device([tree.tokens, shape.depths, *shape.attention_mask.int().tolist()], device)
        return DeviceTree(packed[0], packed[1], packed[2:] != 0, shape, host=tree)

    def cut_to_depth(self, max_depth: int) -> DeviceTree:
        """Without the deeper nodes, where the host knows which these are: a prefix is left."""
        if self.shape is None:
            return replace(self, max_depth=max_depth)
        if self.shape.max_depth <= max_depth:
            return self
        if self.host is not None:
            return DeviceTree.of(self.host.cut_to_depth(max_depth), self.tokens.device)
        shape = TreeShape.of(
            tuple(p for p, depth in zip(self.shape.parents, self.shape.depths, strict=True) if depth <= max_depth)
        )
        cut = DeviceTree.shaped(self.tokens[: len(shape)], shape)
        if self.q is None or max_depth == 0:
            return cut
        families = shape_on(shape, self.tokens.device).families
        return replace(cut, q=self.q[: len(families.nodes)], families=families)


@dataclass(frozen=True)
class ShapeOnDevice:
    """What follows from a shape."""

    depths: Tensor
    seen: Tensor
    families: Families


@lru_cache(maxsize=MOST_SHAPES)
def shape_on(shape: TreeShape, device: torch.device) -> ShapeOnDevice:
    """The constants of a shape that recurs."""
    inner = [node for node in range(len(shape)) if shape.children[node]]
    row_of = {node: row for row, node in enumerate(inner)}
    draws = [[(child, row_of[node]) for child in shape.children[node]] for node in range(len(shape))]
    return ShapeOnDevice(to_device(shape.depths, device), shape.attention_mask.to(device), _families(draws, device))


def _families(draws: list[list[tuple[int, int]]], device: torch.device) -> Families:
    """draws: below each node, as (child, row of q)."""
    inner = [node for node, below in enumerate(draws) if below]
    width = max((len(draws[node]) for node in inner), default=0)
    padded = [draws[node] + [(-1, 0)] * (width - len(draws[node])) for node in inner]
    packed = to_device(
        [[node, *(part for pair in below for part in pair)] for node, below in zip(inner, padded, strict=True)], device
    )
    packed = packed.view(len(inner), 1 + 2 * width)
    return Families(packed[:, 0], packed[:, 1::2], packed[:, 2::2])
