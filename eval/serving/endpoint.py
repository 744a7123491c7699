"""A vLLM server over HTTP: answers are streamed, so that the first token's time is seen; counters are its `/metrics`.

Every request in flight has a thread of its own. Nothing is asked twice: an answer that broke is counted as a failure.
"""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
from pydantic import BaseModel, Field, ValidationError

from draftsmith.data.engines.engine import Failure, FinishReason, Outcome, Request
from draftsmith.data.engines.openai_protocol import PATHS, BadAnswer, read_models, refusal_reason, request_body
from draftsmith.eval.serving.asking import TimedCompletion
from draftsmith.eval.serving.counts import DraftCounts, of_page
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.masking import masked

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0  # between two pieces of an answer
COUNTED_WITHIN_S = 5.0  # vLLM counts a step after its tokens are on their way
REFUSED_ALL = {401, 403, 404}


class _Choice(BaseModel):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Piece(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class ServedEndpoint:
    """A `MeasuredEngine` around one server.

    Args:
        url: With or without `/v1`.
        model: Its name there; by default the only one that it offers.
        api_key: Sent as a bearer token.
        end_ids: Every token that ends an answer.
        most_at_once: Requests.

    Raises:
        UserError: Nobody answers there, it is no vLLM, or it serves another model.
    """

    def __init__(
        self, url: str, model: str | None, api_key: str | None, end_ids: tuple[int, ...], most_at_once: int
    ) -> None:
        self._root = url.rstrip("/").removesuffix("/v1")
        self.name = masked(self._root)
        self._end_ids = end_ids
        self._finished: queue.SimpleQueue[tuple[str, Outcome] | BaseException] = queue.SimpleQueue()
        try:
            self._http = httpx2.Client(
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx2.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
                limits=httpx2.Limits(max_connections=None),
            )
            self.model, self.max_length_tokens = self._checked_model(model)
            self.counts()
        except httpx2.InvalidURL as error:
            raise UserError(f"{self.name} is no URL: {error}") from None
        self._threads = ThreadPoolExecutor(most_at_once)

    def submit(self, request: Request) -> None:
        self._threads.submit(self._work, request)

    def collect(self) -> list[tuple[str, Outcome]]:
        finished = self._finished.get()
        if isinstance(finished, BaseException):
            raise finished
        return [finished]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def counts(self, generated_tokens: int = 0) -> DraftCounts:
        """
        Raises:
            UserError: It shows no counters of vLLM's.
        """
        began = time.monotonic()
        while True:
            response = self._get("/metrics")
            counts = of_page(response.text) if response.status_code == 200 else None
            if counts is None:
                raise UserError(
                    f"{self.name}/metrics shows no counters of vLLM's: it must be a vLLM server, without "
                    "--disable-log-stats"
                )
            if counts.generated_tokens >= generated_tokens or time.monotonic() - began > COUNTED_WITHIN_S:
                return counts
            time.sleep(0.02)

    def forget_prompts(self) -> None:
        """A server keeps its cache."""

    def _checked_model(self, wanted: str | None) -> tuple[str, int | None]:
        response = self._get("/v1/models")
        if response.status_code != 200:
            raise UserError(f"{self.name}/v1/models says {refusal_reason(response.status_code, response.content)}")
        try:
            offered = {card.id: card.max_model_len for card in read_models(response.content)}
        except BadAnswer:
            raise UserError(f"{self.name}/v1/models is no list of models: is it a vLLM server?") from None
        if wanted is None and len(offered) == 1:
            wanted = next(iter(offered))
        if wanted not in offered:
            names = ", ".join(offered) or "no model"
            asked = (
                "name one with --server-model"
                if wanted is None
                else f"not {wanted}: give --server-model as it is there"
            )
            raise UserError(f"{self.name} serves {names}, {asked}")
        assert wanted is not None
        return wanted, offered[wanted]

    def _get(self, path: str) -> httpx2.Response:
        try:
            return self._http.get(self._root + path)
        except httpx2.HTTPError as error:
            raise UserError(f"no vLLM server answers at {self.name} ({error or type(error).__name__})") from None

    def _work(self, request: Request) -> None:
        try:
            self._finished.put((request.key, self._answer(request)))
        except (httpx2.HTTPError, BadAnswer) as error:
            reason = str(error) if isinstance(error, BadAnswer) else f"connection lost ({type(error).__name__})"
            self._finished.put((request.key, Failure(reason)))
        except BaseException as error:  # raised again by `collect`
            self._finished.put(error)

    def _answer(self, request: Request) -> Outcome:
        body: dict[str, Any] = request_body(request, self.model, "completions", self._end_ids, extensions=True)
        ids: list[int] = []
        reason = None
        started = first = last = time.perf_counter()
        url = f"{self._root}/v1{PATHS['completions']}"
        with self._http.stream("POST", url, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                refusal = refusal_reason(response.status_code, response.read())
                if response.status_code in REFUSED_ALL:
                    raise UserError(f"{self.name} says {refusal}: check its URL, --server-model and --api-key-env")
                return Failure(refusal)
            for line in response.iter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                choice = _choice_of(line.removeprefix("data:"))
                if choice.token_ids:
                    last = time.perf_counter()
                    first = last if not ids else first
                    ids += choice.token_ids
                reason = choice.finish_reason or reason
        if reason not in ("stop", "length"):
            return Failure("answer broken off" if reason is None else f"finish reason {reason[:40]}")
        if not ids:
            raise UserError(f"{self.name} gives no token ids: it must be a vLLM server that knows return_token_ids")
        finish: FinishReason = "stop" if reason == "stop" else "length"
        return TimedCompletion(ids, finish, None, first - started, last - first)


def _choice_of(data: str) -> _Choice:
    try:
        return _Piece.model_validate_json(data).choices[0]
    except ValidationError:
        raise BadAnswer("malformed answer") from None
