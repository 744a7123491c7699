"""An engine that drafts as we do accepts what we accept; one that does not is named."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_drafter_of, tiny_target

from draftsmith.cli.agreement import Agreement, compare_with_own_chain
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.engines.endpoint import DraftCounts
from draftsmith.eval.engines.load_test import ArmResult, LoadTestRow, TurnAnswer
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

PROMPTS, NEW_TOKENS, DEPTH = ([5, 9, 33], [7, 8, 12, 40]), 24, 2


def engine_result(target: Any, drafter: Any) -> tuple[ArmResult, float]:
    """Return what an engine would report that decodes with our own loop, and the loop's tau."""
    answers, lengths, depths, committed = [], [], [], 0
    for number, prompt in enumerate(PROMPTS):
        with TargetSession(target, 64) as session:
            session.read_layers(drafter.feature_layers)
            chain = build_tree_drafter(MethodConfig(name="chain", max_depth=DEPTH), drafter.decoder(64), Sampling())
            answer = generate(session, chain, prompt, Sampling(), NEW_TOKENS)
        answers.append(TurnAnswer(answer.ids, 0.1, 0.1, number, 0, prompt))
        lengths += answer.draft_lengths
        depths += [DEPTH] * answer.rounds  # an engine drafts for the last token too
        committed += sum(answer.accept_lengths)
    counts = DraftCounts.of_rounds(lengths, depths)
    return ArmResult(LoadTestRow("with drafter", 0.0, 1), answers, counts), committed / len(lengths)


def test_our_own_chain_is_replayed_exactly() -> None:
    torch.manual_seed(0)
    target = tiny_target()
    drafter = tiny_drafter_of("draft_model", target).freeze()
    result, tau = engine_result(target, drafter)
    found = compare_with_own_chain(result, target, drafter, counts_last_rounds=True)
    assert found is not None
    assert (found.depth, found.answers, tau > 1.1) == (DEPTH, len(PROMPTS), True)
    assert found.own_tau == pytest.approx(tau)
    assert found.engine_tau == pytest.approx(tau)
    begins = f"Accepts here what it accepts there: a chain of 2 draft tokens commits {tau:.3f}"
    assert found.sentence("vLLM").startswith(begins)
    assert compare_with_own_chain(replace(result, counts=DraftCounts()), target, drafter, True) is None


def test_a_difference_is_named() -> None:
    apart = Agreement(4, 24, 2.0, 2.5)
    assert apart.sentence("vLLM").startswith("DOES NOT ACCEPT HERE WHAT IT ACCEPTS THERE: ")
    assert "(20.0% apart)" in apart.sentence("vLLM")
    assert replace(apart, engine_tau=2.46).sentence("vLLM").startswith("Accepts here")
