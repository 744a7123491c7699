"""Invariant 1: every method and every tree returns exactly the target's greedy tokens.

The reference is transformers' `generate`, which shares no code with ours.
"""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support.half_right import (
    BUILDERS,
    GREEDY,
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
from draftsmith.eval.methods.drafter import TreeDrafter
from draftsmith.eval.methods.registry import DecodingSetting, make_method, method_kinds
from draftsmith.eval.methods.specinfer import SpecInfer
from draftsmith.models.decoding.decoders import StepwiseDecoder
from draftsmith.recipes.schema import MethodConfig

FEW_FIRST = ("llama", "gemma2", "gpt2")  # of every one `test_session.py` compares the logits of a tree
NEW_TOKENS = 24


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(TINY[name]).eval()


@pytest.mark.parametrize(
    "name", [name if name in FEW_FIRST else pytest.param(name, marks=pytest.mark.nightly) for name in TINY]
)
def test_greedy_identity_of_all_trees(name: str) -> None:
    """Of drafters that draft in one forward, and level by level; each twice in a session."""
    target = tiny(name)
    drafting = [HalfRightDecoder]
    if name in ("llama", "gpt2"):
        drafting.append(HalfRightStepwiseDecoder)
    with TargetSession(target, 4 + NEW_TOKENS) as session:
        for prompt in ([5, 6, 7, 8], [90, 3]):
            wanted = greedy_reference(target, prompt, NEW_TOKENS)
            assert generate(session, Autoregressive(), prompt, GREEDY, NEW_TOKENS).ids == wanted
            for decoder_of in drafting:
                for tree, builder in BUILDERS.items():
                    method = TreeDrafter(tree, decoder_of(wanted, target.config.vocab_size), builder, GREEDY)
                    out = generate(session, method, prompt, GREEDY, NEW_TOKENS)
                    assert out.ids == wanted, tree
                    assert out.rounds < len(wanted) - 1, f"{tree}: no draft was accepted, so nothing was tested"


FROM_RECIPES: list[dict[str, Any]] = [
    {"kind": "prompt_lookup"},
    {"kind": "prompt_lookup", "options": {"match": "latest", "partial": True}},
    {"kind": "lookahead"},
    {"kind": "lookahead", "options": {"from_prompt": True, "accept_window": True}},
    {"kind": "lookahead", "options": {"level": 2, "window": 1, "guesses": 1}},
    {"kind": "ngram", "tree": "best_first", "options": {"order": 2}},
    {"kind": "ngram", "tree": "static", "options": {"order": 2}, "paths": [[0], [1], [0, 0], [0, 1], [1, 0]]},
]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_identity_of_methods_without_training(name: str, tmp_path: Path) -> None:
    """The draft model is the target's architecture with other weights: its cache must be right for it too."""
    target = tiny(name).double()
    draft = AutoModelForCausalLM.from_config(TINY[name]).double().eval()
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            mine.copy_(0.2 * mine + 0.8 * theirs)
    prompt = [5, 6, 7, 8, 5, 6]
    wanted = greedy_reference(target, prompt, NEW_TOKENS)
    counted = {"input_ids": [[*prompt, *wanted[:15], 1, 2]], "loss_mask": [[1] * 23]}
    datasets.Dataset.from_dict(counted).save_to_disk(str(tmp_path))
    methods: list[Method] = []
    for keys in FROM_RECIPES:
        recipe = MethodConfig.model_validate({"name": keys["kind"], **keys})
        methods.append(make_method(DecodingSetting(recipe, target, None, tmp_path, 50, GREEDY)))
    decoder = DraftModelDecoder(draft, 4, 50, 97)
    decoders: list[StepwiseDecoder] = [decoder, DraftModelDecoder(target, 2, 50, 97)]
    methods += [
        SpecInfer("specinfer", decoders, [1, 2, 1, 1], 1, GREEDY),
        SpecInfer("alone", decoders[:1], [3], 2, GREEDY),
    ]
    methods += [TreeDrafter(f"draft model, {tree}", decoder, BUILDERS[tree], GREEDY) for tree in BUILDERS]
    with TargetSession(target, len(prompt) + NEW_TOKENS) as session:
        for method in (*methods, *methods[: len(FROM_RECIPES)]):
            out = generate(session, method, prompt, GREEDY, NEW_TOKENS)
            assert out.ids == wanted, method.name
            # The earliest n-grams are never right here.
            assert out.rounds < NEW_TOKENS - 1 or method is methods[0], f"{method.name}: no draft was accepted"


def test_every_method_is_tried() -> None:
    assert set(method_kinds()) == {"draft_model", "specinfer", *(keys["kind"] for keys in FROM_RECIPES)}
