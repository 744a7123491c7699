"""Invariant 1: every method and every tree returns exactly the target's greedy tokens.

The reference is transformers' `generate`, which shares no code with ours.
"""

from typing import Any

import numpy as np
import pytest
import torch
from support.half_right import (
    BUILDERS,
    GREEDY,
    GROWERS,
    TINY,
    HalfRightDecoder,
    HalfRightStepwiseDecoder,
    greedy_reference,
)
from transformers import AutoModelForCausalLM

from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.draft_model import DraftModelDecoder
from draftsmith.eval.methods.drafter import TreeBuilder, TreeDrafter
from draftsmith.eval.methods.lookahead import Lookahead
from draftsmith.eval.methods.ngram import NgramDecoder, NgramModel
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.eval.methods.specinfer import SpecInfer
from draftsmith.models.decoding.decoders import StepwiseDecoder


def check_all_trees(
    target: Any,
    prompts: list[list[int]],
    new_tokens: int,
    decoder_of: type[HalfRightDecoder] = HalfRightDecoder,
    builders: dict[str, TreeBuilder] = BUILDERS,
) -> None:
    vocabulary = target.config.vocab_size
    with TargetSession(target, max(map(len, prompts)) + new_tokens) as session:
        for prompt in prompts:
            wanted = greedy_reference(target, prompt, new_tokens)
            assert generate(session, Autoregressive(), prompt, GREEDY, new_tokens).ids == wanted
            for name, builder in builders.items():
                method = TreeDrafter(name, decoder_of(wanted, vocabulary), builder, GREEDY)
                out = generate(session, method, prompt, GREEDY, new_tokens)
                assert out.ids == wanted, name
                assert out.rounds < len(wanted) - 1, f"{name}: no draft was accepted, so nothing was tested"


@pytest.mark.parametrize("name", TINY)
def test_greedy_identity_on_tiny_targets(name: str) -> None:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY[name]).eval()
    check_all_trees(target, [[5, 6, 7, 8], [90, 3]], new_tokens=24)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_greedy_identity_of_methods_without_training(name: str) -> None:
    """The draft model is the target's architecture with other weights: its cache must be right for it too."""
    torch.manual_seed(0)
    target, draft = (AutoModelForCausalLM.from_config(TINY[name]).double().eval() for _ in range(2))
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            mine.copy_(0.3 * mine + 0.7 * theirs)
    prompt, new_tokens = [5, 6, 7, 8, 5, 6], 40
    wanted = greedy_reference(target, prompt, new_tokens)
    decoder = DraftModelDecoder(draft, 4, 50, 97)
    methods: list[Method] = [PromptLookup("prompt_lookup"), Lookahead("lookahead")]
    methods += [PromptLookup("latest", match="latest", partial=True)]
    methods += [Lookahead("own", from_prompt=True, accept_window=True)]
    decoders: list[StepwiseDecoder] = [decoder, DraftModelDecoder(target, 2, 50, 97)]
    methods += [
        SpecInfer("specinfer", decoders, [1, 2, 1, 1], 1, GREEDY),
        SpecInfer("alone", decoders[:1], [3], 2, GREEDY),
    ]
    counts = NgramModel([(np.array([*prompt, *wanted[:25], 1, 2]), np.ones(33))], 2, 97)
    ngram = NgramDecoder(counts, 4, target.device)
    methods += [TreeDrafter(f"ngram, {tree}", ngram, GROWERS[tree], GREEDY) for tree in GROWERS]
    methods += [TreeDrafter(f"draft model, {tree}", decoder, GROWERS[tree], GREEDY) for tree in GROWERS]
    with TargetSession(target, len(prompt) + new_tokens) as session:
        for method in methods:
            assert generate(session, method, prompt, GREEDY, new_tokens).ids == wanted, method.name


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_identity_of_grown_trees(name: str) -> None:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(TINY[name]).eval()
    check_all_trees(target, [[5, 6, 7, 8]], 24, HalfRightStepwiseDecoder, GROWERS)
