"""A client of a serving engine: streamed answers with their times, and the engine's counters of drafts.

Answers are streamed over OpenAI's completions API, to measure the time of the first token, by the client that also
distils. Counters are read from `/metrics` in Prometheus' text format; `COUNTERS` has the names of each engine. The
field `token_ids` of an answer is vLLM's and SGLang's extension of OpenAI's API.

Servers are not trusted: every piece of an answer is checked by a pydantic model, and its size, its number of tokens and
its time are limited.

vLLM's tau is 1 + accepted / drafts over all drafts together. Its accepted tokens include those of an answer's last
draft that exceed the answer's length, so `LoadTestRow` has the committed tau too. Sources of the names: vLLM 0.32,
`v1/spec_decode/metrics.py`; llama.cpp of llama-cpp-python 0.3.36, `tools/server/server-task.cpp`; SGLang 0.5.23,
`srt/observability/metrics_collector.py`, and `SpecTokensDetails` in `srt/entrypoints/openai/protocol.py`, which
`srt/managers/tokenizer_manager.py` fills.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Annotated, Any

import httpx2
import openai
from pydantic import BaseModel, Field, StrictInt, ValidationError

from draftsmith.data.engines.engine import EngineSetting, Failure, Request
from draftsmith.data.engines.openai_answers import (
    MOST_ANSWER_BYTES,
    OTHER_ANSWER,
    RequestRefused,
    ServerFailure,
    one_line,
)
from draftsmith.data.engines.openai_engine import OpenAIEngine, OpenAIOptions
from draftsmith.errors import UserError, masked
from draftsmith.recipes.schema import MOST_DEPTHS

COUNTED_WITHIN_S = 5.0  # vLLM counts a step after its tokens were sent
# Names of the engine's options on the command line.
OPTIONS = {"base_urls": "--server", "model": "--server-model", "api_key_env": "--api-key-env"}

# The fields of `DraftCounts`, by the name of an engine's counter, without the engine and Prometheus' `_total`.
COUNTERS = {
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "drafted_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
    "generation_tokens": "generated_tokens",
    "tokens_predicted": "generated_tokens",  # llama.cpp
    "spec_verify_calls": "drafts",  # SGLang
}
ACCEPTED_BY_DEPTH = "spec_decode_num_accepted_tokens_per_pos"
MOST_COUNTED = 2**53  # above it a float is no exact number
_SAMPLE = re.compile(r"^(\w+):([\w:]+)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')

TokenIds = list[Annotated[StrictInt, Field(ge=0, lt=2**31)]]
Count = Annotated[StrictInt, Field(ge=0, le=MOST_COUNTED)]


class _Choice(BaseModel):
    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None
    finish_reason: str | None = None


class _DraftDetails(BaseModel):
    """SGLang's counts of an answer's rounds: how many accepted 0, 1, 2, ... draft tokens, and all drafted tokens."""

    spec_verify_ct: Count
    spec_num_proposed_drafts: Count
    spec_correct_drafts_histogram: list[Count] = Field(max_length=MOST_DEPTHS + 1)


class _Extension(BaseModel):
    spec_tokens_details: _DraftDetails | None = None


class _Piece(BaseModel):
    """A piece of a streamed answer; llama-server's own API gives `tokens` and `stop`."""

    choices: list[_Choice] = []
    prompt_token_ids: TokenIds | None = None
    sglext: _Extension | None = None
    tokens: TokenIds = []
    stop: bool = False


@dataclass(frozen=True)
class DraftCounts:
    """An engine's counters since its start; subtract an earlier reading to get the counts in between.

    accepted_by_depth: for each depth from 1 on, the number of drafts whose token at that depth was accepted.
    generated_tokens: tokens of all answers.
    """

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    generated_tokens: int = 0

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        by_depth = zip_longest(self.accepted_by_depth, earlier.accepted_by_depth, fillvalue=0)
        totals = {name: getattr(self, name) - getattr(earlier, name) for name in dict.fromkeys(COUNTERS.values())}
        return DraftCounts(accepted_by_depth=tuple(now - before for now, before in by_depth), **totals)

    @staticmethod
    def of_rounds(draft_lengths: list[int], draft_depths: list[int]) -> DraftCounts:
        """Build the counts of drafts from each round's number of accepted draft tokens and depth of its draft."""
        depth = max(draft_depths, default=0)
        return DraftCounts(
            len(draft_lengths),
            sum(draft_depths),
            sum(draft_lengths),
            tuple(sum(length > place for length in draft_lengths) for place in range(depth)),
        )

    @staticmethod
    def of_page(text: str, prefix: str) -> DraftCounts | None:
        """Parse the text of a server's `/metrics`, summed over its engines; None if no name in it has this prefix.

        Raises:
            ValueError: A counter's value is no count, or its depth is beyond that of any draft.
        """
        values = dict.fromkeys(COUNTERS.values(), 0)
        by_depth: dict[int, int] = {}
        samples = [found for found in map(_SAMPLE.match, text.splitlines()) if found and found[1] == prefix]
        for sample in samples:
            name, labels = sample[2].removesuffix("_total"), sample[3] or ""
            position = _POSITION.search(labels) if name == ACCEPTED_BY_DEPTH else None
            if name not in COUNTERS and position is None:
                continue
            value = float(sample[4])
            if not 0 <= value <= MOST_COUNTED or (position and int(position[1]) >= MOST_DEPTHS):
                raise ValueError(f"{name} is {one_line(sample[0])[:80]}")
            if position is None:
                values[COUNTERS[name]] += int(value)
            else:
                by_depth[int(position[1])] = by_depth.get(int(position[1]), 0) + int(value)
        accepted_by_depth = tuple(by_depth.get(place, 0) for place in range(max(by_depth, default=-1) + 1))
        return DraftCounts(accepted_by_depth=accepted_by_depth, **values) if samples else None

    @property
    def tau(self) -> float | None:
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Return for each depth the share of all drafts whose token there was accepted."""
        return [count / self.drafts for count in self.accepted_by_depth] if self.drafts else []


@dataclass(frozen=True)
class TimedAnswer:
    """Token ids of an answer, seconds to its first token, and seconds from its first token to its last."""

    ids: list[int]
    first_token_s: float
    rest_s: float


class Endpoint(OpenAIEngine):
    """Client of one vLLM server: sends requests and reads the server's counts of drafts. Requests are never retried.

    Args:
        setting: The target's tokenizer and end tokens.
        is_ours: Whether no other client uses the server, so that its prefix cache may be emptied.

    Raises:
        UserError: The server does not answer, has no counters of drafts, or serves another model.
    """

    engine, prefix, counting = "vLLM", "vllm", "without --disable-log-stats"
    ids_option = "return_token_ids"
    retries = 0
    connect_timeout_s = 60.0  # a load test makes servers slow
    asks_trial = False  # its tokens would be counted

    @staticmethod
    def option(name: str) -> str:
        return OPTIONS.get(name, name)

    def __init__(
        self,
        url: str,
        setting: EngineSetting,
        model: str | None = None,
        api_key_env: str | None = None,
        is_ours: bool = False,
    ) -> None:
        self._root, self._is_ours = url.rstrip("/").removesuffix("/v1"), is_ours
        try:
            options = OpenAIOptions(base_urls=[f"{self._root}/v1"], model=model, api_key_env=api_key_env)
        except ValidationError as error:
            detail = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"{masked(url)} is no URL of a server: {detail}") from None
        super().__init__(options, setting)
        try:
            self.counts()
        except UserError:
            self.close()
            raise

    def counts(self, generated_tokens: int = 0) -> DraftCounts:
        """Read the counters, waiting up to `COUNTED_WITHIN_S` until they include `generated_tokens` tokens.

        Raises:
            UserError: The server has no known counters, or a damaged one.
        """
        start_s = time.monotonic()
        while True:
            try:
                counts = DraftCounts.of_page(self._call("get", "/metrics"), self.prefix)
            except ValueError as error:
                raise UserError(f"{masked(self._root)}/metrics has a damaged counter: {error}") from None
            if counts is None:
                name = self.engine
                raise UserError(f"{masked(self._root)}/metrics has no counters of {name}: start {name} {self.counting}")
            if counts.generated_tokens >= generated_tokens or time.monotonic() - start_s > COUNTED_WITHIN_S:
                return counts
            time.sleep(0.02)

    def forget_prompts(self) -> None:
        """Empty the server's prefix cache, if no other client uses it."""
        if self._is_ours:
            self._call("post", "/reset_prefix_cache")

    async def answer(self, request: Request) -> TimedAnswer | Failure:
        """Stream the answer to a request.

        Raises:
            UserError: The server rejects settings that all requests share, or returns no token ids.
        """
        try:
            return await self.response(self._servers[0], self._streamed(request))
        except (RequestRefused, ServerFailure) as problem:
            return Failure(str(problem))

    async def _streamed(self, request: Request) -> TimedAnswer | Failure:
        """Collect the streamed answer and its times, both limited."""
        (server,) = self._servers
        ids: list[int] = []
        reason: str | None = None
        started = first = last = time.perf_counter()
        try:
            async with asyncio.timeout(self.options.timeout_s):
                async for new_ids, ending in self._pieces(request):
                    if new_ids:
                        last = time.perf_counter()
                        first = last if not ids else first
                        ids += new_ids
                    if len(ids) > request.settings.max_new_tokens + 1:  # some engines do not count the end token
                        return Failure("malformed answer: longer than max_new_tokens")
                    reason = ending or reason
        except ValidationError as error:
            place = ".".join(map(str, error.errors(include_input=False)[0]["loc"]))
            return Failure(f"malformed answer: {place or 'no JSON'}")
        except (httpx2.HTTPError, TimeoutError) as error:
            return Failure(f"answer broken off ({type(error).__name__})")
        if reason not in ("stop", "length"):
            return Failure("answer broken off" if reason is None else f"finish reason {one_line(reason)[:40]}")
        if not ids:
            raise UserError(
                f"{server.url} returns no token ids: give a server of {self.engine} that supports {self.ids_option}"
            )
        if max(ids) >= self._vocabulary.size:
            return Failure("malformed answer: token ids outside the target's vocabulary")
        return TimedAnswer(ids, first - started, last - first)

    async def _pieces(self, request: Request) -> AsyncIterator[tuple[list[int] | None, str | None]]:
        """Yield (new token ids, finish reason) as they arrive; either may be None."""
        (server,) = self._servers
        streaming = server.client.completions.with_streaming_response
        async with streaming.create(**self.arguments(request), stream=True) as response:
            async for piece in _read_pieces(response.iter_bytes()):
                if piece.sglext is not None and piece.sglext.spec_tokens_details is not None:
                    self._count_rounds(piece.sglext.spec_tokens_details, request.settings.max_new_tokens)
                if piece.choices:
                    for part in (piece, piece.choices[0]):
                        if part.prompt_token_ids not in (None, request.prompt_ids):
                            raise ServerFailure(OTHER_ANSWER)
                    yield piece.choices[0].token_ids, piece.choices[0].finish_reason

    def _count_rounds(self, details: _DraftDetails, most_rounds: int) -> None:
        """Read the counts at the end of SGLang's answers, which other servers do not send."""

    def _call(self, method: str, path: str) -> str:
        """Return the text of a page of the server, by its path without `/v1`; empty if it does not exist."""
        (server,) = self._servers

        async def page() -> str:
            try:
                return await getattr(server.client, method)(server.url.removesuffix("/v1") + path, cast_to=str)
            except openai.NotFoundError:
                return ""

        try:
            return self.run(self.response(server, page()))
        except (ServerFailure, RequestRefused) as problem:
            raise UserError(f"{masked(self._root)}{path} failed: {problem}") from None


class LlamaEndpoint(Endpoint):
    """Client of one `llama-server` (llama.cpp), which returns token ids only by its own API, `/completion`."""

    engine, prefix, counting, ids_option = "llama.cpp", "llamacpp", "with --metrics", "return_tokens"
    start_command = "llama-server --metrics --model"

    def forget_prompts(self) -> None:
        """Do nothing: every request disables the prompt cache."""

    async def _pieces(self, request: Request) -> AsyncIterator[tuple[list[int] | None, str | None]]:
        settings = request.settings
        body = {
            "prompt": request.prompt_ids, "n_predict": settings.max_new_tokens, "temperature": settings.temperature,
            "top_k": settings.top_k, "top_p": settings.top_p, "min_p": 0.0, "seed": request.seed % 2**32,
            "samplers": ["top_k", "top_p", "temperature"], "cache_prompt": False, "return_tokens": True, "stream": True,
        }  # fmt: skip
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        async with (
            httpx2.AsyncClient(timeout=self.options.timeout_s, trust_env=False) as http,
            http.stream("POST", f"{self._root}/completion", json=body, headers=headers) as response,
        ):
            if response.status_code != httpx2.codes.OK:
                detail = one_line((await response.aread()).decode(errors="replace"))[:200]
                raise RequestRefused(f"HTTP {response.status_code}: {detail}")
            async for piece in _read_pieces(response.aiter_bytes()):
                # The last piece repeats the tokens of the whole answer.
                yield (None, "stop") if piece.stop else (piece.tokens, None)


class SglangEndpoint(Endpoint):
    """Client of one SGLang server; the counts of drafts are those that each answer carries.

    SGLang counts rounds and generated tokens in `/metrics`, but no accepted tokens: `sglang:spec_accept_length` is a
    gauge of the last log interval. Answers carry exact counts of all three, which other clients do not change.
    """

    engine, prefix, counting = "SGLang", "sglang", "with --enable-metrics"
    start_command = "python -m sglang.launch_server --enable-metrics --model-path"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._draft_lengths: list[int] = []
        self._draft_depths: list[int] = []
        super().__init__(*arguments, **options)
        self._rounds_before = super().counts().drafts

    def arguments(self, request: Request) -> dict[str, Any]:
        arguments = super().arguments(request)
        arguments["extra_body"]["return_spec_tokens_details"] = True
        return arguments

    def counts(self, generated_tokens: int = 0) -> DraftCounts:
        """Return the counts of drafts in all answers so far, and the server's counter of generated tokens.

        Raises:
            UserError: The server has no known counters, or it drafts but its answers carry no counts.
        """
        page = super().counts(generated_tokens)
        if generated_tokens and page.drafts > self._rounds_before and not self._draft_lengths:
            raise UserError(
                f"{masked(self._root)} drafts, but its answers do not report the accepted tokens: give a server of "
                "SGLang 0.5.20 or later, which supports return_spec_tokens_details"
            )
        answered = DraftCounts.of_rounds(self._draft_lengths, self._draft_depths)
        return replace(answered, generated_tokens=page.generated_tokens)

    def _count_rounds(self, details: _DraftDetails, most_rounds: int) -> None:
        """Add an answer's rounds.

        Raises:
            ServerFailure: They contradict one another or the answer's length.
        """
        rounds, histogram = details.spec_verify_ct, details.spec_correct_drafts_histogram
        drafted = details.spec_num_proposed_drafts
        if not 0 < rounds == sum(histogram) <= most_rounds or drafted > rounds * MOST_DEPTHS:
            raise ServerFailure("malformed answer: spec_tokens_details")
        for accepted, count in enumerate(histogram):
            self._draft_lengths += [accepted] * count
        self._draft_depths += [drafted // rounds] * rounds


async def _read_pieces(chunks: AsyncIterable[bytes]) -> AsyncIterator[_Piece]:
    """Parse the events of a streamed answer.

    Raises:
        pydantic.ValidationError: An event is no piece of an answer.
        ServerFailure: The answer is too large.
    """
    line, num_bytes = b"", 0
    async for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > MOST_ANSWER_BYTES:
            raise ServerFailure(f"answer of more than {MOST_ANSWER_BYTES >> 20} MiB")
        *lines, line = (line + chunk).split(b"\n")
        for event in lines:
            text = event.strip().removeprefix(b"data:").strip()
            if event.startswith(b"data:") and text != b"[DONE]":
                yield _Piece.model_validate_json(text)
