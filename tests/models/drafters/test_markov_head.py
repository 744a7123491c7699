"""The Markov head: logits by hand, a neutral start, exact q along paths, and one forward of the layers."""

from typing import Any
from unittest import mock

import pytest
import torch
from support.tiny_models import LENGTH, VOCABULARY, random_batch, tiny_drafter_of, tiny_target

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.group_wise import MaskOptions
from draftsmith.models.base.registry import drafter_kinds, load_drafter_class
from draftsmith.models.decoding.decoders import MarkovDecoder

MASKED = [k for k in drafter_kinds() if issubclass(load_drafter_class(k).config_class.Options, MaskOptions)]
every_masked_kind = pytest.mark.parametrize("kind", MASKED)
RANK = 5


def start_decoder(drafter: Drafter) -> tuple[Any, int]:
    """Return a decoder that has read seven tokens, and the last one."""
    batch = random_batch(drafter.attached.target, drafter=drafter)
    decoder = drafter.decoder(LENGTH)
    decoder.start(batch["input_ids"][0, :7], batch["features"][0, :7])
    return decoder, int(batch["input_ids"][0, 6])


@every_masked_kind
def test_new_markov_head_changes_nothing(kind: str) -> None:
    """Loss, logits and later random draws are equal; W1 gets gradients once W2 is not zero."""
    target, found = tiny_target(num_hidden_layers=4), []
    for rank in (0, RANK):
        torch.manual_seed(3)
        drafter = load_drafter_class(kind).from_target(target, {"markov_rank": rank, "keep_ratio": 0.7})
        batch = random_batch(target, drafter=drafter)
        logits = drafter.eval().group_logits(batch["input_ids"], batch["features"])
        loss = drafter.train()(**batch).loss
        loss.backward()
        found.append((logits.detach(), loss.detach(), torch.rand(3)))
    for without, having in zip(*found, strict=True):
        assert torch.equal(without, having)
    gradients = {name: p.grad for name, p in drafter.named_parameters() if name.startswith("markov_head.")}
    assert {name: tuple(p.shape) for name, p in gradients.items() if p is not None} == {
        "markov_head.markov_w1.weight": (VOCABULARY, RANK), "markov_head.markov_w2.weight": (VOCABULARY, RANK),
    }  # fmt: skip
    assert [bool(gradient.abs().sum() > 0) for gradient in gradients.values() if gradient is not None] == [False, True]


# ---- decoding ----


@pytest.mark.parametrize(("kind", "options"), [("parallel", {"num_masks": 3}), ("dspark", {"block_size": 4})])
def test_nodes_of_all_depths_in_one_call(kind: str, options: dict[str, Any]) -> None:
    """Every node has its depth's logits and its own token's row of the table."""
    drafter = tiny_drafter_of(kind, tiny_target(num_hidden_layers=4), markov_rank=RANK, **options)
    decoder, newest = start_decoder(drafter)
    with mock.patch.object(drafter, "markov_head", None):
        marginals = start_decoder(drafter)[0].draft()
    first, second = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    table = first @ second.T  # [V, V'], what each previous token adds
    assert isinstance(decoder, MarkovDecoder)
    torch.testing.assert_close(decoder.begin(), marginals[:1] + table[newest])
    with mock.patch.object(drafter, "run_layers", side_effect=AssertionError("layers run once a round")):
        torch.testing.assert_close(decoder.expand([8, 9], [0, 0]), marginals[1] + table[[8, 9]])
        mixed = decoder.expand([4, 5, 6], [1, 0, 2])
    torch.testing.assert_close(mixed, torch.stack([marginals[d] + table[x] for x, d in ((4, 2), (5, 1), (6, 2))]))
    torch.testing.assert_close(decoder.expand([7], [3]), marginals[3:] + table[[7]])
    with pytest.raises(ValueError, match="a node at depth 4 has no children: 4 depths are drafted"):
        decoder.expand([7], [6])
    with pytest.raises(ValueError, match=r"must be among the tree.s 7 nodes"):
        decoder.expand([7], [7])
    with pytest.raises(ValueError, match="drafting needs a new token"):
        decoder.begin()
