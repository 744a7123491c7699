"""Targets with recurrent layers: a chain that is rejected leaves no trace.

The references are `generate` of transformers and forwards without a cache.
"""

import math
from pathlib import Path

import pytest
import torch
from support.half_right import BUILDERS, GREEDY, HalfRightDecoder, greedy_reference
from support.tiny_models import HYBRIDS, VOCABULARY, tiny_target
from support.tiny_runs import save_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import TreeDrafter
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.decoding.recurrent import MOST_UNREAD_TOKENS
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.schema import TargetRecipe

PROMPT = [5, 9, 33, 12, 40, 7]


def chain(*tokens: int) -> DraftTree:
    return DraftTree([*tokens], TreeShape.chain(len(tokens) - 1))


def plain_logits(target: PreTrainedModel, ids: list[int]) -> Tensor:
    return target(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize(
    "name", [name if name == "qwen3_next" else pytest.param(name, marks=pytest.mark.nightly) for name in HYBRIDS]
)
def test_greedy_answers_are_those_of_generate(name: str) -> None:
    """Chains are accepted in part, round after round, so that tokens are read again with and without a draft."""
    target, new_tokens = tiny_target(name), 2 * MOST_UNREAD_TOKENS
    with TargetSession(target, len(PROMPT) + new_tokens) as session:
        for prompt in (PROMPT, [3]):
            expected = greedy_reference(target, prompt, new_tokens)
            assert generate(session, Autoregressive(), prompt, GREEDY, new_tokens).ids == expected
            method = TreeDrafter("x", HalfRightDecoder(expected, VOCABULARY), BUILDERS["chain"], GREEDY)
            answer = generate(session, method, prompt, GREEDY, new_tokens)
            assert answer.ids == expected
            assert 0 < answer.accepted_drafts < answer.tried


@pytest.mark.parametrize("name", HYBRIDS)
def test_rejected_tokens_leave_no_trace(name: str) -> None:
    """Logits and features of every chain, after rejections of each length and after a chain that nobody committed."""
    target, ids = tiny_target(name), list(PROMPT)
    with TargetSession(target, 64) as session:
        session.prefill(ids)
        for length, accepted in ((4, 1), (3, 2), (4, 4), (1, 1), (4, 1), (2, 1), (1, 1), (3, 3), (4, 2)) * 2:
            tokens = [3 + (7 * len(ids) + place) % 50 for place in range(length)]
            session.forward_tree(chain(50, 51, 52))
            step = session.forward_tree(chain(*tokens))
            expected = plain_logits(target, ids + tokens)[-length:]
            assert torch.allclose(step.logits, expected, atol=1e-4 * float(expected.abs().max())), len(ids)
            features = target_features(target, torch.tensor([ids + tokens]))[0, -length:]
            assert torch.allclose(step.features, features, atol=1e-4 * float(features.abs().max()))
            session.commit([*range(accepted)])
            ids += tokens[:accepted]


def test_single_steps_are_those_of_a_longer_forward(tmp_path: Path) -> None:
    """Time steps shorter than `time_step_min`, which transformers lengthens in longer forwards only."""
    target = tiny_target("nemotron_h", time_step_min=0.05)
    mixers = [module for module in target.modules() if hasattr(module, "time_step_limit")]
    for mixer in mixers:
        mixer.dt_bias.fill_(-9.0)
    target.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, VOCABULARY)
    loaded, _ = load_target(TargetRecipe(model=str(tmp_path), device="cpu", dtype="float32"))
    ids, steps = [PROMPT[0]], []
    with TargetSession(loaded, 32) as session:
        session.prefill(ids)
        for token in (*PROMPT[1:], *PROMPT):
            steps.append(session.forward_tree(chain(token)).logits[0])
            session.commit([0])
            ids.append(token)
    largest = float(torch.stack(steps).abs().max())
    assert torch.allclose(torch.stack(steps), plain_logits(loaded, ids)[1:], atol=1e-5 * largest)
    for mixer in mixers:
        mixer.time_step_limit = (target.config.time_step_min, math.inf)
    assert not torch.allclose(torch.stack(steps), plain_logits(target, ids)[1:], atol=1e-3 * largest)
