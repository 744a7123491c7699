"""Replayed rounds equal those of the decoding loop on the target's own answers."""

import pytest
import torch
from support.tiny_models import tiny_target

from draftsmith.eval.bench.replay import accepted_lengths
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import TreeDrafter, tree_builder
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.features import target_features
from draftsmith.recipes.schema import MethodConfig

NEW_TOKENS = 24


@pytest.mark.parametrize("kind", ["parallel", "eagle"])
def test_replayed_trees_have_the_same_rounds_as_the_loop(kind: str) -> None:
    """New drafters start as the target's layers or heads, so that some draft tokens are accepted.

    Chains are in `tests/cli/test_agreement.py`.
    """
    torch.manual_seed(0)
    target = tiny_target(num_hidden_layers=4).double()
    drafter = load_drafter_class(kind).from_target(target, {}).freeze()
    decoder = drafter.decoder(128)
    recipe = MethodConfig(name="mine", tree="best_first", nodes=8, branch=3)
    method = TreeDrafter("mine", decoder, tree_builder(recipe), Sampling())
    prompt = list(range(5, 25))
    with TargetSession(target, 128, drafter.feature_layers) as session:
        answer = generate(session, method, prompt, Sampling(), NEW_TOKENS, ())
    ids_s = torch.tensor([*prompt, *answer.ids])
    assert len(answer.ids) == NEW_TOKENS
    features_sf = target_features(target, ids_s[None], layers=drafter.feature_layers)[0]
    first, last = len(prompt), len(ids_s) - 1
    assert accepted_lengths(method, ids_s.tolist(), features_sf, first, last) == answer.accept_lengths
