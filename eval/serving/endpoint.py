"""A client of a serving engine: streamed answers with their times, and what the engine counts of its drafts.

Answers come over OpenAI's completions API, so that the first token's time is seen; every request in flight has a thread
of its own, and nothing is asked twice: an answer that breaks off is a failure. Counters are those of `/metrics` in
Prometheus' text format; another engine's names go into `COUNTERS`, and how it gives token ids into `_token_ids`.

vLLM's tau is 1 + accepted / drafts over all drafts together. Accepted is what verification let pass: of the last draft
of an answer that may be more than the answer still took, so `figures` gives the committed tau beside it.
Source of the names: vLLM 0.32, `v1/spec_decode/metrics.py`.
"""

from __future__ import annotations

import queue
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import httpx2
import openai

from draftsmith.data.engines.engine import Completion, Failure, FinishReason, Outcome, Request
from draftsmith.data.engines.openai_engine import NO_KEY, ServerFails, read_models, refusal_reason, request_arguments
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.masking import masked

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0  # between two pieces of an answer
COUNTED_WITHIN_S = 5.0  # vLLM counts a step after its tokens were sent
REFUSED_ALL = {401, 403, 404}

# The fields of `DraftCounts`, by the name of an engine's counter, without Prometheus' `_total`.
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    "vllm:generation_tokens": "generated_tokens",
}
ACCEPTED_BY_DEPTH = "vllm:spec_decode_num_accepted_tokens_per_pos"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True)
class DraftCounts:
    """Counts since the engine began; the difference of two is what happened between them.

    accepted_by_depth: drafts of which at least so many tokens were accepted, from depth 1 on.
    generated_tokens: of all answers.
    """

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    generated_tokens: int = 0

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        by_depth = zip_longest(self.accepted_by_depth, earlier.accepted_by_depth, fillvalue=0)
        return DraftCounts(
            self.drafts - earlier.drafts,
            self.drafted_tokens - earlier.drafted_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(now - before for now, before in by_depth),
            self.generated_tokens - earlier.generated_tokens,
        )

    @staticmethod
    def of_rounds(draft_lengths: list[int], draft_depths: list[int]) -> DraftCounts:
        """The same of our own decoder's rounds: drafted tokens kept, and drafted, in each."""
        depth = max(draft_depths, default=0)
        return DraftCounts(
            len(draft_lengths),
            sum(draft_depths),
            sum(draft_lengths),
            tuple(sum(length > place for length in draft_lengths) for place in range(depth)),
        )

    @staticmethod
    def of_page(text: str) -> DraftCounts | None:
        """From a server's `/metrics`, summed over its engines; None if it shows none of the counters."""
        values = dict.fromkeys(COUNTERS.values(), 0)
        by_depth: dict[int, int] = {}
        is_known = False
        for sample in filter(None, map(_SAMPLE.match, text.splitlines())):
            name, labels, value = sample[1].removesuffix("_total"), sample[2] or "", sample[3]
            if name == ACCEPTED_BY_DEPTH and (position := _POSITION.search(labels)):
                by_depth[int(position[1])] = by_depth.get(int(position[1]), 0) + int(float(value))
            elif name in COUNTERS:
                values[COUNTERS[name]] += int(float(value))
                is_known = True
        accepted_by_depth = tuple(by_depth.get(place, 0) for place in range(max(by_depth, default=-1) + 1))
        return DraftCounts(accepted_by_depth=accepted_by_depth, **values) if is_known else None

    @property
    def tau(self) -> float | None:
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Marginal: the share of drafts whose token at this depth was accepted, and so all before it."""
        return [count / self.drafts for count in self.accepted_by_depth] if self.drafts else []

    @property
    def acceptance_conditional(self) -> list[float | None]:
        """Of the drafts whose token one depth before was accepted, those whose token here was."""
        return [now / before if before else None for before, now in pairwise((self.drafts, *self.accepted_by_depth))]


@dataclass(frozen=True)
class TimedCompletion(Completion):
    """`first_token_s`: from the request to its first token; `rest_s`: from that to the last one."""

    first_token_s: float = 0.0
    rest_s: float = 0.0


class Endpoint:
    """One server, which is asked so many questions at once.

    Args:
        url: With or without `/v1`.
        model: Its name there; by default the only one that it offers.
        api_key: Sent as a bearer token.
        end_ids: Every token that ends an answer.
        most_at_once: Requests.
        is_ours: Nobody else uses it, so that its cache of prompts may be emptied.

    Raises:
        UserError: Nobody answers there, it counts no drafts, or it serves another model.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        api_key: str | None,
        end_ids: tuple[int, ...],
        most_at_once: int,
        is_ours: bool = False,
    ) -> None:
        self._root = url.rstrip("/").removesuffix("/v1")
        self.name = masked(self._root)
        self._api_key, self._end_ids, self._is_ours = api_key, end_ids, is_ours
        self._finished: queue.SimpleQueue[tuple[str, Outcome] | BaseException] = queue.SimpleQueue()
        try:
            self._client = openai.OpenAI(
                base_url=f"{self._root}/v1",
                api_key=api_key or NO_KEY,
                max_retries=0,
                timeout=openai.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            )
        except (httpx2.InvalidURL, openai.OpenAIError) as error:
            raise UserError(f"{self.name} is no URL: {error}") from None
        self.model, self.max_length_tokens = self._checked_model(model)
        self.counts()
        self._threads = ThreadPoolExecutor(most_at_once)

    def submit(self, request: Request) -> None:
        self._threads.submit(self._work, request)

    def collect(self) -> list[tuple[str, Outcome]]:
        """Wait for the next answer, a `TimedCompletion` with token ids, or its `Failure`."""
        finished = self._finished.get()
        if isinstance(finished, BaseException):
            raise finished
        return [finished]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def counts(self, generated_tokens: int = 0) -> DraftCounts:
        """What was counted so far, once as many generated tokens were.

        Raises:
            UserError: It shows no counters that are known.
        """
        began = time.monotonic()
        while True:
            counts = DraftCounts.of_page(self._page("/metrics"))
            if counts is None:
                raise UserError(
                    f"{self.name}/metrics shows no counters of vLLM's: it must be a vLLM server, without "
                    "--disable-log-stats"
                )
            if counts.generated_tokens >= generated_tokens or time.monotonic() - began > COUNTED_WITHIN_S:
                return counts
            time.sleep(0.02)

    def forget_prompts(self) -> None:
        """Empty the cache of prompts of a server of our own."""
        if self._is_ours:
            self._client.post(f"{self._root}/reset_prefix_cache", cast_to=str)

    def _page(self, path: str) -> str:
        try:
            return self._client.get(f"{self._root}{path}", cast_to=str)
        except openai.APIConnectionError as error:
            raise UserError(f"no vLLM server answers at {self.name} ({error.__cause__ or error})") from None
        except openai.APIStatusError as error:
            if path == "/metrics" and error.status_code == 404:
                return ""
            raise UserError(f"{self.name}{path} says {refusal_reason(error, self._api_key)}") from None

    def _checked_model(self, wanted: str | None) -> tuple[str, int | None]:
        try:
            offered = read_models(self._page("/v1/models").encode())
        except ServerFails:
            raise UserError(f"{self.name}/v1/models is no list of models: is it a vLLM server?") from None
        if wanted is None and len(offered) == 1:
            wanted = next(iter(offered))
        if wanted is None or wanted not in offered:
            names = ", ".join(offered) or "no model"
            given = f"not {wanted}: give --server-model as it is there"
            raise UserError(f"{self.name} serves {names}, {given if wanted else 'name one with --server-model'}")
        return wanted, offered[wanted]

    def _work(self, request: Request) -> None:
        try:
            self._finished.put((request.key, self._answer(request)))
        except openai.APIStatusError as error:
            reason = refusal_reason(error, self._api_key)
            if error.status_code in REFUSED_ALL:
                self._finished.put(
                    UserError(f"{self.name} says {reason}: check its URL, --server-model and --api-key-env")
                )
            else:
                self._finished.put((request.key, Failure(reason)))
        except (openai.OpenAIError, httpx2.HTTPError) as error:
            self._finished.put((request.key, Failure(f"connection lost ({type(error).__name__})")))
        except BaseException as error:  # raised again by `collect`
            self._finished.put(error)

    def _answer(self, request: Request) -> Outcome:
        arguments = request_arguments(request, self.model, "completions", self._end_ids, extensions=True)
        ids: list[int] = []
        reason: str | None = None
        started = first = last = time.perf_counter()
        with self._client.completions.create(**arguments, stream=True) as stream:
            for piece in stream:
                if not piece.choices:
                    continue
                if new_ids := _token_ids(piece.choices[0]):
                    last = time.perf_counter()
                    first = last if not ids else first
                    ids += new_ids
                reason = piece.choices[0].finish_reason or reason
        if reason not in ("stop", "length"):
            return Failure("answer broken off" if reason is None else f"finish reason {reason[:40]}")
        if not ids:
            raise UserError(f"{self.name} gives no token ids: it must be a vLLM server that knows return_token_ids")
        finish: FinishReason = "stop" if reason == "stop" else "length"
        return TimedCompletion(ids, finish, None, first - started, last - first)


def _token_ids(choice: Any) -> list[int]:
    """Of a piece of an answer; a field that vLLM adds to OpenAI's."""
    return getattr(choice, "token_ids", None) or []
