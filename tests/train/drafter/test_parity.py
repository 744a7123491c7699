"""The train = decode check itself: correct drafters pass, each kind of wrong one is found at the right place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_models import random_batch, tiny_target

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.drafters.parallel import ParallelDrafter
from draftsmith.train.drafter.parity import TOLERANCE, Difference, loop_like_prefixes, perturb, worst_difference


def drafter_difference(kind: str, options: dict[str, Any], change: Callable[[Any], None]) -> Difference:
    """Return the largest difference of a new drafter after `change` altered its decoder."""
    target = tiny_target()
    torch.manual_seed(0)
    drafter: Drafter = load_drafter_class(kind).from_target(target, options).eval()
    if options.get("draft_vocab_size"):
        drafter.choose_draft_vocab(torch.arange(target.config.vocab_size).float())
    perturb(drafter)
    made = drafter.decoder

    def decoder(length: int) -> Any:
        changed = made(length)
        change(changed)
        return changed

    drafter.decoder = decoder  # type: ignore[method-assign]
    ids = random_batch(target, 1)["input_ids"]
    return worst_difference(drafter, target, ids, loop_like_prefixes(ids.shape[1]))


def attach_below_wrong_node(decoder: Any) -> None:
    """Draft a child of the true token as its sibling's."""
    expand = decoder.expand
    decoder.expand = lambda tokens, parents: expand(tokens, [max(0, parent - 1) for parent in parents])


def keep_first_feature(decoder: Any) -> None:
    observe = decoder.observe
    decoder.observe = lambda ids, features: observe(ids, features[:1].expand_as(features))


def return_nan(decoder: Any) -> None:
    begin = decoder.begin
    decoder.begin = lambda: begin() * torch.nan


def use_full_vocabulary(decoder: Any) -> None:
    columns = decoder.columns
    decoder.columns = type("All", (), {"widened": lambda self, logits, elsewhere: columns.widened(logits, -100.0)})()


@pytest.mark.parametrize(
    ("kind", "change", "options", "place"),
    [
        ("eagle", lambda decoder: None, {}, None),
        ("hydra", lambda decoder: None, {"draft_vocab_size": 20}, None),
        ("hydra", attach_below_wrong_node, {}, "depth"),
        ("eagle", keep_first_feature, {}, "prefix"),
        ("eagle", return_nan, {}, "inf"),
        ("eagle", use_full_vocabulary, {"draft_vocab_size": 20}, "inf"),
    ],
)
def test_wrong_stepwise_decoder_is_found(
    kind: str, change: Callable[[Any], None], options: dict[str, Any], place: str | None
) -> None:
    """A correct decoder passes, also with a reduced vocabulary; a wrong one is found at its first difference."""
    found = drafter_difference(kind, options, change)
    if place is None:
        assert found.size < TOLERANCE
    elif place == "inf":
        assert found.size == float("inf")
    else:
        assert 0.001 < found.size < 100
        assert place != "depth" or found.depth > 1
        assert place != "prefix" or found.prefix_tokens == 11  # the only round that commits several tokens precedes it


def test_parallel_drafter_passes_unless_a_feature_is_shifted() -> None:
    target = tiny_target()
    drafter: Any = ParallelDrafter.from_target(target, {"num_masks": 3}).eval()
    perturb(drafter)
    ids = random_batch(target, 1)["input_ids"]
    prefixes = loop_like_prefixes(ids.shape[1])
    assert prefixes == [8, 9, 11]
    assert worst_difference(drafter, target, ids, prefixes).size < TOLERANCE
    real_inputs = drafter.real_inputs
    drafter.real_inputs = lambda ids, previous: real_inputs(ids, previous.roll(1, -2))
    assert worst_difference(drafter, target, ids, prefixes).size > 0.01
