"""Continuations that share a cache: each has the logits that it has alone."""

import torch
from support.beam_models import PROMPT, model

from draftsmith.eval.decoding.shared_prefix import Continuations


def test_continuations_are_scored_as_by_a_plain_forward() -> None:
    """Branches, gaps that are filled, what is dropped and what is committed: as if the whole sequence were read."""
    target = model(1)
    tree = Continuations(target, PROMPT, 60)

    def same(*continuations: tuple[int, ...]) -> None:
        found = tree.logits(list(continuations))
        for row, continuation in zip(found, continuations, strict=True):
            plain = target(torch.tensor([[*PROMPT, *continuation]])).logits[0, -1].float()
            torch.testing.assert_close(row, plain, atol=1e-6, rtol=1e-6)

    same((), (1,), (2, 3), (2, 4))
    assert tree.forwards == 1
    same((2, 3, 5), (2, 4, 5, 6), (1, 1))
    tree.keep([(2, 3, 5), (2, 4, 5, 6, 7)])
    assert (2, 3, 5) in tree
    assert (1,) not in tree
    assert tree._cache.committed == len(PROMPT) + 1  # token 2, which both begin with
    assert tree._cache.ahead == 5
    same((2, 3, 5), (2, 4, 5, 6, 7), (2, 3, 5, 8, 9), (2, 4, 5, 6, 8))
    assert tree.forwards == 3
    tree.keep([(2, 3, 5, 8, 9)])
    assert (tree._cache.committed, tree._cache.ahead) == (len(PROMPT) + 5, 0)
    same((2, 3, 5, 8, 9, 1), (2, 3, 5, 8, 9, 2, 2))
