"""An engine with known answers, times and counters, for tests of measurements in engines."""

import asyncio
from typing import Any

from draftsmith.data.engines.engine import Failure, Request
from draftsmith.eval.engines.endpoint import DraftCounts, TimedAnswer

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
