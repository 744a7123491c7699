"""Chains that training replays from one forward equal those of decoding."""

from typing import Any

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from torch import Tensor

from draftsmith.eval.bench.replay import accepted_lengths
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.features import target_features
from draftsmith.recipes.schema import MethodConfig
from draftsmith.train.drafter.rows import replayed_chains

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("parallel", {}),
    ("parallel", {"markov_rank": 5}),
    ("eagle_parallel", {}),
    ("eagle3", {"draft_vocab_size": 40}),
    ("hydra", {}),
    ("medusa", {}),
    ("dflash", {}),
    ("dflash2", {"selector_rank": 6, "selector_top_k": 3, "num_layers": 1}),
    ("dspark", {"markov_rank": 5}),
    ("peagle", {"draft_vocab_size": 40}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_replayed_chains_equal_decoding(kind: str, options: dict[str, Any]) -> None:
    """The answer follows each draft for 0 to G tokens and then differs, as a target's may."""
    target = tiny_target(num_hidden_layers=4)
    drafter = tiny_drafter_of(kind, target, **options).requires_grad_(False)  # as in decoding
    with torch.no_grad():
        for head in drafter.own_heads:  # which are initialised from the target's
            head.weight.add_(0.1 * torch.randn_like(head.weight))
        if kind == "dflash2":  # a selector with an effect
            drafter.candidate_selector.successor_codebook.normal_()
    depths = drafter.config.num_depths
    method = build_tree_drafter(MethodConfig(name="chain"), drafter.decoder(120), Sampling())
    generator = torch.Generator().manual_seed(5)

    def hidden_states(ids: list[int]) -> Tensor:
        return target_features(target, torch.tensor([ids]), layers=drafter.feature_layers)[0]

    def drawn(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    first, lengths = 4, list[int]()
    ids = [3 + drawn(VOCABULARY - 3) for _ in range(first + 1)]
    while len(ids) < 60:
        features_sf = hidden_states(ids)
        method.start(ids[:first], features_sf[:first])
        method.observe(ids[first:], features_sf[first - 1 : -1])
        drafts = method.propose().tokens[1:]
        assert len(drafts) == depths
        accepted = drawn(depths + 1)
        lengths.append(accepted + 1)
        wrong = [drafts[accepted]] if accepted < depths else []
        ids += [*drafts[:accepted], next(t for t in range(3 + drawn(30), VOCABULARY) if t not in wrong)]
    ids_bs, mask_bs = torch.tensor([ids]), torch.tensor([[0] * first + [1] * (len(ids) - first)])
    features, teacher = drafter.training_features(target, ids_bs)
    with torch.no_grad():
        output = drafter(ids_bs, features, mask_bs, teacher_features=teacher)
    tokens, rounds = replayed_chains(output.correct_bgs, mask_bs)
    assert (tokens[-1], rounds[-1]) == (sum(lengths), len(lengths))
    assert accepted_lengths(method, ids, hidden_states(ids), first, len(ids) - 1) == lengths
