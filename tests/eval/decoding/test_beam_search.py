"""Speculative beam search returns what transformers' beam search returns, from fewer forwards of the target."""

from typing import Any

import pytest
import torch
from support.beam_models import PROMPT, V, model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from draftsmith.eval.decoding.beam_search import Beams, beam_search
from draftsmith.recipes.errors import UserError


def reference(
    target: PreTrainedModel, width: int, tokens: int, eos: list[int], **options: Any
) -> tuple[list[list[int]], list[float]]:
    """transformers' own, the padding behind the end cut off."""
    out = target.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    sequences = []
    for row in out.sequences[:, len(PROMPT) :].tolist():
        end = next((index + 1 for index, token in enumerate(row) if token in eos), len(row))
        sequences.append(row[:end])
    return sequences, out.sequences_scores.tolist()


def check(found: Beams, wanted: tuple[list[list[int]], list[float]]) -> None:
    assert found.sequences == wanted[0]
    assert found.scores == pytest.approx(wanted[1], abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
@pytest.mark.parametrize(("width", "draft_width"), [(2, 2), (3, 6), (5, 5)])
def test_the_result_is_that_of_transformers(seed: int, width: int, draft_width: int) -> None:
    """Without end tokens, with one, and with several; what is drafted well, badly and not at all."""
    target = model(seed)
    near, far = model(seed + 100, like=target), model(seed + 200)
    for eos in ([], [seed + 1], [2, 11, 17]):
        wanted = reference(target, width, 20, eos)
        plain = beam_search(target, PROMPT, width, 20, eos)
        check(plain, wanted)
        assert plain.steps_per_forward == 1
        for draft in (near, far, target):
            for gamma in (1, 4):
                found = beam_search(target, PROMPT, width, 20, eos, draft, draft_width, gamma)
                check(found, wanted)
                assert found.steps == plain.steps
                assert found.forwards <= plain.forwards


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.7, 2.0])
def test_length_penalty_and_early_stopping(kind: str, early_stopping: Any, length_penalty: float) -> None:
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    eos = [1, 2, 4, 7, 9, 13]
    stopped_early = 0
    for seed in range(3):
        target = model(seed, kind=kind)
        draft = model(seed + 50, like=target, kind=kind)
        found = beam_search(target, PROMPT, 3, 24, eos, draft, **options)
        check(found, reference(target, 3, 24, eos, **options))
        stopped_early += found.steps < 24
    assert stopped_early > 0 or kind == "gpt2" or early_stopping == "never"


def test_steps_per_forward() -> None:
    """The target as its own draft model: gamma + 1 steps a forward, but for the last. 1 + 5 * 4 + 3 = 24."""
    target = model(0)
    found = beam_search(target, PROMPT, 3, 24, (), target, 3, gamma=4)
    assert (found.steps, found.forwards) == (24, 5)
    assert found.steps_per_forward == pytest.approx(23 / 5)
    plain = beam_search(target, PROMPT, 3, 24)
    assert (plain.steps, plain.forwards, plain.sequences) == (24, 23, found.sequences)
    near = beam_search(target, PROMPT, 3, 24, (), model(100, like=target), 6)
    assert 5 <= near.forwards < 23
    assert near.sequences == found.sequences
    assert beam_search(target, PROMPT, 3, 1).forwards == 0


def test_a_wider_draft_needs_no_more_forwards() -> None:
    target = model(3)
    draft = model(103, like=target)
    forwards = [beam_search(target, PROMPT, 3, 24, (), draft, width).forwards for width in (3, 9, 20)]
    assert forwards[2] < forwards[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 1}, "needs num_beams >= 2"),
        ({"draft_beams": 2}, "draft_beams >= num_beams"),
        ({"gamma": 0}, "gamma >= 1"),
        ({"max_new_tokens": 61}, "do not fit into the target's 64 positions"),
    ],
)
def test_what_makes_no_sense(arguments: dict[str, Any], message: str) -> None:
    target = model(0)
    with pytest.raises(UserError, match=message):
        beam_search(target, PROMPT, **{"num_beams": 3, "max_new_tokens": 8, "draft_model": target, **arguments})


def test_a_draft_model_must_know_the_targets_tokens() -> None:
    target = model(0)
    smaller = AutoModelForCausalLM.from_config(LlamaConfig(**{**target.config.to_dict(), "vocab_size": V - 1}))
    with pytest.raises(UserError, match="the draft model has fewer tokens than the target"):
        beam_search(target, PROMPT, 3, 8, (), smaller)
