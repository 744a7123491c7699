"""The load test's requests and figures, with an engine whose answers and counters are known."""

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
BEFORE, AFTER = DraftCounts(4, 8, 2, (2, 0), 50), DraftCounts(9, 18, 6, (5, 1), 61)


class CountingEngine:
    """Engine of three answers of four tokens; a prompt that holds `fails` has none."""

    def __init__(self, fails: int = -1, max_length_tokens: int | None = None) -> None:
        self.fails, self.max_length_tokens = fails, max_length_tokens
        self.requests: list[Request] = []
        self.in_flight = self.most_in_flight = 0

    def run(self, coroutine: Any) -> Any:
        return asyncio.run(coroutine)

    async def answer(self, request: Request) -> TimedAnswer | Failure:
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return Failure("HTTP 500") if self.fails in request.prompt_ids else TimedAnswer([10] * 4, 0.5, 0.75)

    def counts(self, generated_tokens: int = 0) -> DraftCounts:
        return AFTER if self.requests else BEFORE


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(Path(folder), VOCABULARY)
    return AutoTokenizer.from_pretrained(folder)


def send_all(engine: Any, tokenizer: Any, concurrency: int) -> ArmResult:
    return send_questions(engine, tokenizer, QUESTIONS, GenerationSettings(max_new_tokens=8), 0, concurrency, DRAFTING)


def test_requests_and_figures(tokenizer: Any) -> None:
    """Nine tokens came after the prompts'. Five drafts accepted four of ten, one of them past an answer's end."""
    engine = CountingEngine()
    result = send_all(engine, tokenizer, 1)
    assert engine.most_in_flight == 1
    # A turn follows the answer before it.
    assert [request.key for request in engine.requests] == ["1/0", "2/0", "2/1"]
    assert engine.requests[2].prompt_ids == [6, 10, 10, 10, 10, 7]
    row = result.row
    assert (row.drafts, row.drafted_tokens, row.accepted_tokens, row.tokens) == (5, 10, 4, 12)
    assert row.tau == pytest.approx(1 + 4 / 5)
    assert row.tau_committed == pytest.approx(9 / 5)
    assert row.acceptance_by_depth == pytest.approx([3 / 5, 1 / 5])
    assert (row.first_token_s, row.user_tokens_per_s) == (0.5, pytest.approx(4 / 1.25))
    row.compute(result.answers, DraftCounts(2, 4, 4, (2, 2), 12))  # two drafts, three rounds without any
    assert row.tau_committed == pytest.approx(9 / 5)


def test_concurrency_failures_and_turns_without_room(tokenizer: Any) -> None:
    engine = CountingEngine(fails=6)
    result = send_all(engine, tokenizer, 2)
    assert engine.most_in_flight == 2
    assert (result.row.failures, len(result.answers)) == ({"HTTP 500": 1}, 1)
    assert sorted(request.key for request in engine.requests) == ["1/0", "2/0"]
    result = send_all(CountingEngine(max_length_tokens=12), tokenizer, 2)
    assert (result.row.turns_left_out, len(result.answers)) == (1, 2)


def test_speedup_is_against_the_same_temperature_and_concurrency() -> None:
    def row(arm: str, concurrency: int, tokens_per_s: float, **failures: int) -> LoadTestRow:
        return LoadTestRow(arm, 0.0, concurrency, tokens_per_s, *[None] * 3, [], failures=failures)

    plain = [row(PLAIN, 1, 10), row(PLAIN, 4, 40), row(PLAIN, 16, 70, timeout=1)]
    rows = with_speedups([*plain, row(DRAFTING, 1, 15), row(DRAFTING, 4, 30), row(DRAFTING, 16, 50)])
    assert [each.speedup for each in rows] == [None, None, None, 1.5, 0.75, None]
    assert with_speedups([row(DRAFTING, 1, 15)])[0].speedup is None
