"""Replay: a drafter's tau on known answers of the target, at T = 0, without a forward of the target per round."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.eval.decoding.method import Method
from draftsmith.eval.trees.verify import DraftTree
from draftsmith.train.drafter.rows import answers_in


@torch.inference_mode()
def replay(method: Method, rows: Iterable[tuple[Tensor, Tensor, Tensor]]) -> float | None:
    """Draft through every answer of every example at T = 0. Returns tau over all rounds; None without any round.

    A self-distilled answer gives the target's next token after every token, and one forward of the target over an
    example gives the features of all rounds. Except for ties, the rounds equal those of `decoding/generate.py`; if the
    answers were sampled, a draft token counts as accepted when it equals the sampled one.

    Args:
        rows: Token ids [S], loss mask [S] (1 at tokens of answers) and the features [S, F] that the method reads.
    """
    lengths: list[int] = []
    for ids_s, mask_s, features_sf in rows:
        for first, last in answers_in(mask_s.tolist()):
            if first and last > first:
                lengths += accepted_lengths(method, ids_s.tolist(), features_sf, first, last)
    return sum(lengths) / len(lengths) if lengths else None


def accepted_lengths(method: Method, ids: list[int], features_sf: Tensor, first: int, last: int) -> list[int]:
    """Return the tokens that each round commits, the target's own included, in the answer from `first` to `last`."""
    method.start(ids[:first], features_sf[:first])
    method.observe([ids[first]], features_sf[first - 1 : first])
    newest, lengths = first, []
    while newest < last:
        tree = method.propose().cut_to_depth(last - newest - 1)
        committed = _accepted(tree, ids[newest + 1 :]) + 1
        lengths.append(committed)
        if newest + committed < last:
            method.observe(ids[newest + 1 : newest + 1 + committed], features_sf[newest : newest + committed])
        newest += committed
    return lengths


def _accepted(tree: DraftTree, following: list[int]) -> int:
    """Count the tokens of `following` that a path of the tree matches from the root on."""
    node, accepted = 0, 0
    while (child := next((c for c in tree.children(node) if tree.tokens[c] == following[accepted]), None)) is not None:
        node, accepted = child, accepted + 1
        if accepted == len(following):
            break
    return accepted
