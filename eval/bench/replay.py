"""Replay: a drafter's rounds on known answers of the target, at T = 0, without a forward of the target per round."""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.eval.decoding.method import Method
from draftsmith.eval.trees.verify import follow


@torch.inference_mode()
def accepted_lengths(method: Method, ids: list[int], features_sf: Tensor, first: int, last: int) -> list[int]:
    """Return how many tokens each round commits, the target's own included, in the answer `ids[first]` to `ids[last]`.

    A self-distilled answer gives the target's next token after every token, and one forward of the target over an
    example gives the features of all rounds. Except for ties, the rounds equal those of `decoding/generate.py`; if the
    answer was sampled, a draft token counts as accepted when it equals the sampled one.

    Args:
        features_sf: [S, F] features of the target that the method reads, F values for each of the S tokens `ids`.
    """
    method.start(ids[:first], features_sf[:first])
    method.observe([ids[first]], features_sf[first - 1 : first])
    newest, lengths = first, []
    while newest < last:
        tree = method.propose().cut_to_depth(last - newest - 1)
        following = [ids[newest + 1 + depth] for depth in tree.depths]
        committed = len(follow(tree, following.__getitem__).path)
        lengths.append(committed)
        if newest + committed < last:
            method.observe(ids[newest + 1 : newest + 1 + committed], features_sf[newest : newest + committed])
        newest += committed
    return lengths
