"""The load test's requests and figures, with an engine whose answers are known.

Question 1 (w5): drafts of two tokens of which 2, 0 and 1 are accepted: 7 tokens, tau 1 + 3/3 = 2. Question 2 (w6), two
turns: 0 and 0 accepted, 3 tokens per turn, tau 1.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import VOCABULARY
from support.tiny_runs import save_tokenizer
from transformers import AutoTokenizer

from draftsmith.data.engines.engine import Failure, GenerationSettings, Request
from draftsmith.data.sources.questions import Question
from draftsmith.eval.engines.endpoint import DraftCounts, TimedAnswer
from draftsmith.eval.engines.load_test import DRAFTING, PLAIN, ArmResult, LoadTestRow, send_questions, with_speedups

QUESTIONS = [Question(1, "writing", ("w5",)), Question(2, "math", ("w6", "w7"))]
KEPT = {5: [2, 0, 1], 6: [0, 0]}  # by the second to last id of a prompt: accepted ones of two draft tokens, by round


class CountingEngine:
    """Engine whose accepted draft tokens are `KEPT`. A prompt that holds `fails` has no answer."""

    def __init__(self, max_length_tokens: int | None = None, fails: int = -1) -> None:
        self.max_length_tokens, self.fails = max_length_tokens, fails
        self.requests: list[Request] = []
        self.in_flight = self.most_in_flight = 0
        self._counts = DraftCounts()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run(coroutine)

    async def answer(self, request: Request) -> TimedAnswer | Failure:
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        if self.fails in request.prompt_ids:
            return Failure("HTTP 500")
        kept = next(kept for key, kept in KEPT.items() if key in request.prompt_ids)
        tokens = 1 + sum(length + 1 for length in kept)
        ours = DraftCounts.of_rounds(kept, [2] * len(kept))
        before = self._counts
        self._counts = DraftCounts(
            before.drafts + ours.drafts,
            before.drafted_tokens + ours.drafted_tokens,
            before.accepted_tokens + ours.accepted_tokens,
            tuple(a + b for a, b in zip(before.accepted_by_depth or (0, 0), ours.accepted_by_depth, strict=True)),
            before.generated_tokens + tokens,
        )
        return TimedAnswer([10] * tokens, 0.5, 0.25 * (tokens - 1))

    def counts(self, generated_tokens: int = 0) -> DraftCounts:
        assert self._counts.generated_tokens >= generated_tokens
        return self._counts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(Path(folder), VOCABULARY)
    return AutoTokenizer.from_pretrained(folder)


def send_all(engine: CountingEngine, tokenizer: Any, concurrency: int) -> ArmResult:
    return send_questions(engine, tokenizer, QUESTIONS, GenerationSettings(max_new_tokens=8), 0, concurrency, DRAFTING)


def test_figures_of_sequential_questions(tokenizer: Any) -> None:
    engine = CountingEngine()
    asked = send_all(engine, tokenizer, 1)
    assert engine.most_in_flight == 1
    row = asked.row()
    assert row.drafts == 7
    assert row.tau == pytest.approx(1 + 3 / 7)
    assert row.tau_committed == pytest.approx((6 + 2 + 2) / 7)
    assert row.acceptance_by_depth == pytest.approx([2 / 7, 1 / 7])
    assert row.tokens == 7 + 3 + 3
    assert row.first_token_s == 0.5
    # A turn follows the answer before it.
    assert [request.key for request in engine.requests] == ["1/0", "2/0", "2/1"]
    assert engine.requests[2].prompt_ids == [6, 10, 10, 10, 7]


def test_concurrent_questions_and_cut_answers(tokenizer: Any) -> None:
    """Two of question 1's 7 tokens were cut at the end, which the counters do not show."""
    engine = CountingEngine()
    asked = send_all(engine, tokenizer, 4)
    assert engine.most_in_flight == 2
    row = asked.row()
    assert row.tau == pytest.approx(1 + 3 / 7)
    del next(answer for answer in asked.answers if answer.question_id == 1).ids[-2:]
    cut = asked.row()
    assert (cut.tau, cut.tau_committed) == (row.tau, pytest.approx((4 + 2 + 2) / 7))


def test_failures_and_turns_without_room(tokenizer: Any) -> None:
    engine = CountingEngine(fails=6)
    asked = send_all(engine, tokenizer, 2)
    assert (asked.failures, len(asked.answers)) == ({"HTTP 500": 1}, 1)
    assert sorted(request.key for request in engine.requests) == ["1/0", "2/0"]
    asked = send_all(CountingEngine(max_length_tokens=12), tokenizer, 2)
    assert (asked.turns_left_out, len(asked.answers)) == (1, 2)


def test_speedup_is_against_the_same_temperature_and_concurrency() -> None:
    def row(arm: str, concurrency: int, tokens_per_s: float) -> LoadTestRow:
        return LoadTestRow(arm, 0.0, concurrency, tokens_per_s, *[None] * 3, [])

    rows = with_speedups([row(PLAIN, 1, 10), row(PLAIN, 4, 40), row(DRAFTING, 1, 15), row(DRAFTING, 4, 30)])
    assert [each.speedup for each in rows] == [None, None, 1.5, 0.75]
    assert with_speedups([row(DRAFTING, 1, 15)])[0].speedup is None
