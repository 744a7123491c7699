"""What a level of a draft tree is filled with: the most likely tokens, or draws with or without replacement.

Everything here takes logits or q of a drafter's columns and gives the target's tokens (`TokenColumns`).

Shapes: R rows, V columns (the vocabulary, or the draft vocabulary), N tree nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.trees.sampling import Sampling, race
from draftsmith.eval.trees.tree import DraftTree, TreeShape
from draftsmith.models.decoding.token_columns import ALL_TOKENS, TokenColumns
from draftsmith.models.decoding.transfers import to_host
from draftsmith.recipes.errors import UserError


@dataclass(frozen=True)
class StaticPaths:
    """Medusa's paths of ranks as a tree, level by level.

    Args:
        shape: N nodes.
        ranks: [N], of a node's token among its parent's most likely ones.
        siblings: [N], the node's place among its parent's children.
    """

    shape: TreeShape
    ranks: tuple[int, ...]
    siblings: tuple[int, ...]

    @staticmethod
    def of(paths: list[list[int]]) -> StaticPaths:
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
        shape = TreeShape.of(tuple(parents))
        siblings = [0] * len(parents)
        for children in shape.children:
            for index, node in enumerate(children):
                siblings[node] = index
        return StaticPaths(shape, (0, *(path[-1] for path in ordered)), tuple(siblings))

    def check(self, num_depths: int, vocabulary: int) -> None:
        """
        Raises:
            UserError: The drafter does not draft as deep, or has fewer tokens than there are siblings.
        """
        depth, width = self.shape.max_depth, max(self.ranks) + 1
        if depth > num_depths or width > vocabulary:
            raise UserError(
                f"the static tree is {depth} deep and {width} wide, but the drafter drafts {num_depths} tokens "
                f"of a vocabulary of {vocabulary}: shorten `paths`, or train a drafter of more depths"
            )


def most_likely(
    logits: Tensor, count: int, sampling: Sampling, columns: TokenColumns = ALL_TOKENS
) -> tuple[list[list[int]], list[list[float]]]:
    """The `count` most likely tokens of each row of [R, V], best first, and their log probabilities, none above 0."""
    top, log_q = likeliest(logits, count, sampling)
    if logits.device.type == "cpu":
        return _tokens(top, columns), log_q.tolist()
    # Columns are exact in double precision: one copy for both.
    chosen, read = to_host(torch.stack([top.double(), log_q.double()]))
    return [columns.tokens([int(column) for column in row]) for row in chosen], read


def likeliest(logits: Tensor, count: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The `count` most likely columns of each row of [R, V], best first, and their log probabilities, on the device."""
    if not sampling.greedy:
        logits = logits / sampling.temperature
    top = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return top.indices, top.values - logits.logsumexp(-1, keepdim=True)


def candidates_on_device(
    logits: Tensor, width: int, sampling: Sampling, generator: torch.Generator | None, columns: TokenColumns
) -> tuple[Tensor | None, Tensor]:
    """q [R, V] at T > 0, and `width` tokens of each row of [R, V], ranked or drawn; -1 where there are no more."""
    count = min(width, logits.shape[-1])
    if sampling.greedy:
        q, chosen = None, logits.topk(count, dim=-1).indices
    else:
        q = sampling.probabilities(logits)
        chosen = first_of_race(q, count, generator)
    return q, torch.nn.functional.pad(columns.tokens_of(chosen), (0, width - count), value=-1)


def ranked(logits: Tensor, count: int, columns: TokenColumns = ALL_TOKENS) -> list[list[int]]:
    """The `count` most likely tokens of each row of [R, V], best first; -1 where there are no more columns."""
    return _padded(logits.topk(min(count, logits.shape[-1]), dim=-1).indices, count, columns)


def draw_without_replacement(
    q: Tensor, count: int, generator: torch.Generator | None, columns: TokenColumns = ALL_TOKENS
) -> list[list[int]]:
    """`count` different tokens from each row of q [R, V], in the order drawn; -1 where q has no more tokens."""
    drawn = first_of_race(q, min(count, q.shape[-1]), generator)
    return _padded(drawn, count, columns)


def first_of_race(q: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """[R, count] different columns of each row of q [R, V], in the order drawn; -1 where q has no more tokens."""
    # The order of q / Exp(1) is the order of draws without replacement.
    drawn = race(q, generator).topk(count, dim=-1).indices
    return drawn.masked_fill(q.gather(-1, drawn) <= 0, -1)


def draw_independently(
    q: Tensor, count: int, generator: torch.Generator | None, columns: TokenColumns = ALL_TOKENS
) -> list[list[int]]:
    """`count` tokens from each row of q [R, V], with replacement."""
    return _tokens(torch.multinomial(q, count, replacement=True, generator=generator), columns)


def _tokens(chosen: Tensor, columns: TokenColumns) -> list[list[int]]:
    return [columns.tokens(row) for row in chosen.tolist()]


def _padded(chosen: Tensor, count: int, columns: TokenColumns) -> list[list[int]]:
    missing = [-1] * (count - chosen.shape[-1])
    return [row + missing for row in _tokens(chosen, columns)]


def drafted_nodes(tree: DraftTree) -> list[int]:
    """All nodes but those whose token is -1, and all below them."""
    if -1 not in tree.tokens:
        return list(range(len(tree)))
    kept = {-1}
    for node, token in enumerate(tree.tokens):
        if token >= 0 and tree.parents[node] in kept:
            kept.add(node)
    return sorted(kept - {-1})


def without_blanks(tree: DraftTree) -> DraftTree:
    """Without the nodes whose token is -1 (there were fewer tokens to draft than siblings), and all below them."""
    return tree.cut_to(drafted_nodes(tree))
