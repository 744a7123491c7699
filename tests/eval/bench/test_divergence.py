"""Differing greedy answers are classified as a numerical tie or a bug."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.report_facts import made_up
from support.tiny_models import tiny_target

from draftsmith.data.sources.questions import Question
from draftsmith.eval.bench.divergence import divergence_at, find_divergences
from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.report.summary import summarize
from draftsmith.models.sampling import Sampling

PROMPT = [5, 9, 33, 12]
TOKENS = 20


class FakeBench:
    """The parts of a bench that `find_divergences` needs: one question of two turns."""

    def __init__(self, target: Any, session: TargetSession) -> None:
        self.target, self.session = target, session
        self.questions = [Question(1, "writing", ("first", "second"))]
        self.prompts: list[tuple[str, ...]] = []

    def prompt_ids(self, turns: tuple[str, ...], answers: list[str]) -> list[int]:
        self.prompts.append(tuple(answers))
        return PROMPT


@pytest.fixture
def target() -> Any:
    return tiny_target()


@pytest.fixture
def bench(target: Any) -> Iterator[FakeBench]:
    with TargetSession(target, 64) as session:
        yield FakeBench(target, session)


def greedy_answer(target: Any) -> list[int]:
    with TargetSession(target, 64) as session:
        return generate(session, Autoregressive(), PROMPT, Sampling(), TOKENS).ids


def with_equal_logits(target: Any, token: int) -> int:
    """Copy this token's row of the head to the last token and return that one; greedy decoding takes the first."""
    other = len(target.lm_head.weight) - 1
    with torch.no_grad():
        target.lm_head.weight[other] = target.lm_head.weight[token]
    return other


def make_records(expected: list[list[int]], found: list[list[int]]) -> QuestionRecord:
    record = made_up(0, 2.0, 4.0)
    for key, answers in (("autoregressive@0", expected), ("chain@0", found)):
        (turn,) = record.answers[key].turns
        record.answers[key].turns = [replace(turn, ids=ids, text=f"answer {n}") for n, ids in enumerate(answers)]
    return record


def test_ties_and_bugs_in_records(target: Any, bench: FakeBench) -> None:
    """They are in the second turn, whose prompt has the first answer; later turns are different conversations."""
    answer = greedy_answer(target)
    position = 11
    twin = with_equal_logits(target, answer[position])
    tie = [*answer[:position], twin, *answer[position + 1 :]]
    bug = [*answer[:position], (answer[position] + 1) % twin, *answer[position + 1 :]]
    records = [make_records([answer, answer], [answer, tie]), replace(make_records([answer], [bug]), run=1)]
    at_tie, at_bug = found = find_divergences(bench, records, [])  # type: ignore[arg-type]
    assert (at_tie.run, at_tie.turn, at_tie.arm, at_tie.position, at_tie.found) == (0, 1, "chain@0", position, twin)
    assert at_tie.gap == 0.0
    assert at_tie.is_tie
    logits = target(torch.tensor([PROMPT + answer[:position]])).logits[0, -1]
    assert at_bug.gap == pytest.approx(float(logits.max() - logits[bug[position]]), abs=1e-5)
    assert at_bug.gap > 100 * at_bug.noise
    assert not at_bug.is_tie
    assert bench.prompts == [("answer 0",), ()]
    assert find_divergences(bench, records, found) == found  # type: ignore[arg-type]
    assert len(bench.prompts) == 2, "what is known is not looked at again"
    row = summarize(records, found)[-1]
    assert (row["greedy_identical"], row["different_answers"], row["numerical_ties"]) == (False, 2, 1)


def test_noise_is_at_least_the_spacing_of_the_dtype(target: Any) -> None:
    """A bf16 logit has 8 bits: equal rounding in two computations does not exclude the neighbouring values."""
    target = target.bfloat16()
    answer = greedy_answer(target)
    wrong = [*answer[:-1], (answer[-1] + 1) % 61]
    with TargetSession(target, 64) as session:
        found = divergence_at(TOKENS - 1, target, session, 1, PROMPT, answer, wrong)
    largest = target(torch.tensor([PROMPT + answer[:-1]])).logits[0, -1].float().max()
    assert found.noise >= 2**-7 * float(largest)
    assert found.gap >= 0


def test_recomputes_token_by_token_if_blocks_do_not_explain_the_gap(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding rounds differently from blocks, and a tie in either is a tie."""
    answer = greedy_answer(target)
    other = [*answer[:-1], (answer[-1] + 1) % 61]
    logits_v = target(torch.tensor([PROMPT + answer[:-1]])).logits[0, -1]
    gap = float(logits_v[answer[-1]] - logits_v[other[-1]])
    noises = {8: gap / 4, 1: gap / 1.5}
    asked: list[int] = []

    def logits(session: object, prompt: list[int], known: list[int], block_tokens: int) -> torch.Tensor:
        asked.append(block_tokens)
        return logits_v + noises[block_tokens]

    monkeypatch.setattr("draftsmith.eval.bench.divergence._logits_in_blocks", logits)
    with TargetSession(target, 64) as session:
        tie = divergence_at(TOKENS - 1, target, session, 1, PROMPT, answer, other)
        assert (asked, tie.is_tie, tie.noise) == ([8, 1], True, pytest.approx(gap / 1.5, abs=1e-4))
        noises |= {1: gap / 3}
        bug = divergence_at(TOKENS - 1, target, session, 1, PROMPT, answer, other)
        assert (bug.is_tie, bug.noise) == (False, pytest.approx(gap / 3, abs=1e-4))
        noises |= {8: gap / 1.5}
        assert divergence_at(TOKENS - 1, target, session, 1, PROMPT, answer, other).is_tie
    assert asked == [8, 1, 8, 1, 8]
