"""Medusa: its heads start as the target's own, its loss is the paper's, and any architecture will do."""

from typing import Any

import pytest
import torch
from support.tiny_models import LENGTH, VOCABULARY, random_batch, tiny_drafter_of, tiny_target
from transformers import PreTrainedModel

from draftsmith.eval.decoding.loop import TargetSession, generate
from draftsmith.eval.methods.drafter import DrafterMethod, tree_builder
from draftsmith.eval.trees.verify import Sampling
from draftsmith.models.drafters.medusa import MedusaDrafter
from draftsmith.models.target.features import target_features
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MethodRecipe

HIDDEN = 32


def tiny_medusa(target: PreTrainedModel, **options: Any) -> MedusaDrafter:
    drafter = tiny_drafter_of("medusa", target, **{"num_heads": 3, **options})
    assert isinstance(drafter, MedusaDrafter)
    return drafter


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("lm_heads", ["separate", "shared"])
def test_every_head_starts_as_the_targets_own(model_type: str, lm_heads: str) -> None:
    """At the start head d of group t gives the logits that predicted x_t, whatever d."""
    target = tiny_target(model_type)
    drafter = MedusaDrafter.from_target(target, {"num_heads": 3, "num_layers": 2, "lm_heads": lm_heads})
    ids = random_batch(target)["input_ids"]
    with torch.no_grad():
        logits = drafter.group_logits(ids, target_features(target, ids))
        own = target(ids).logits
    assert logits.shape == (2, 3, LENGTH, VOCABULARY)
    for j in range(3):
        assert torch.equal(logits[:, j, 1:], own[:, :-1])


def test_the_first_token_has_no_feature_before_it() -> None:
    """A prompt of one token: drafted from zeros, as group 0 is in training."""
    target = tiny_target()
    drafter = tiny_medusa(target)
    batch = random_batch(target, 1)
    ids, features = batch["input_ids"], batch["features"]
    decoder = drafter.decoder(LENGTH)
    with pytest.raises(ValueError, match="call start"):
        decoder.draft()
    decoder.start(ids[0, :1], features[0, :1])
    with torch.no_grad():
        expected = drafter.group_logits(ids, torch.zeros_like(features))[0, :, 0]
    torch.testing.assert_close(decoder.draft(), expected)


def test_an_lm_head_with_a_bias_can_only_be_shared() -> None:
    target = tiny_target("phi", partial_rotary_factor=1.0)
    assert target.lm_head.bias is not None
    with pytest.raises(UserError, match=r"has a bias.*drafter.options.lm_heads=shared"):
        MedusaDrafter.from_target(target, {})
    drafter = MedusaDrafter.from_target(target, {"lm_heads": "shared"})
    ids = random_batch(target)["input_ids"]
    with torch.no_grad():
        target.lm_head.bias += torch.arange(VOCABULARY)
        logits = drafter.group_logits(ids, target_features(target, ids))
        assert torch.equal(logits[:, 4, 1:], target(ids).logits[:, :-1])


def blockwise_parallel_decoding(
    target: PreTrainedModel, drafter: MedusaDrafter, prompt: list[int], new_tokens: int
) -> tuple[list[int], list[int]]:
    """The answer, and the tokens of each round, with plain forwards over everything and no cache.

    Predict: the target (p_1) and the heads (p_2, ...) each take their most likely token. Verify: the longest prefix of
    these where every token is the target's most likely after those before it. Accept that prefix.
    """

    def greedy_after(ids: list[int]) -> int:
        return int(target(torch.tensor([ids])).logits[0, -1].argmax())

    ids, rounds = [*prompt, greedy_after(prompt)], [1]
    while len(ids) < len(prompt) + new_tokens:
        # p_1 of this round verified the last: its token is the newest. The heads go on from there.
        sequence = torch.tensor([ids])
        block = drafter.group_logits(sequence, target_features(target, sequence))[0, :, -1].argmax(-1).tolist()
        accepted: list[int] = []
        for token in block:
            if token != greedy_after([*ids, *accepted]):
                break
            accepted.append(token)
        room = len(prompt) + new_tokens - len(ids)
        committed = [*accepted, greedy_after([*ids, *accepted])][:room]
        ids += committed
        rounds.append(len(committed))
    return ids[len(prompt) :], rounds[1:]


@torch.no_grad()
def test_a_greedy_chain_is_blockwise_parallel_decoding() -> None:
    """Stern et al. (arXiv 1811.03115) with exact match: the same answer in the very same blocks."""
    target = tiny_target().double()
    drafter = tiny_medusa(target)
    new_tokens, drafted = 30, 0
    with TargetSession(target, 64) as session:
        decoder = drafter.decoder(64)
        builder = tree_builder(MethodRecipe(name="x", tree="chain"), decoder)
        for prompt in ([5, 9, 33, 12], [1, 2, 1, 2, 1], [7, 7, 7, 7]):
            answer, rounds = blockwise_parallel_decoding(target, drafter, prompt, new_tokens)
            out = generate(session, DrafterMethod("x", decoder, builder, Sampling()), prompt, Sampling(), new_tokens)
            assert (out.ids, out.accept_lengths) == (answer, rounds)
            drafted += out.accepted_drafts
    assert drafted > 0, "no head was ever right, so nothing was tested"
