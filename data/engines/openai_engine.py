"""Answers from any server that speaks OpenAI's API (vLLM, SGLang, llama.cpp, ...), or from many of them at once.

    data:
      distill:
        engine: openai
        options: {base_urls: ["http://node1:8000/v1", "http://node2:8000/v1"]}

A server behind a password is `https://me:$PASSWORD@host/v1`: the environment holds it, and no file ever does.

An event loop in a thread of its own keeps up to `concurrency_per_server` requests in flight at each server, so that
nothing that the main thread does (templates, writing) keeps a server waiting. Retries, back-off and servers that come
and go: `servers.py`.
"""

import asyncio
import os
import queue
import threading
import time
from typing import Any

import httpx2
from pydantic import Field, field_validator

from draftsmith.data.engines.engine import EngineSetting, Failure, GenerationSettings, Outcome, Request
from draftsmith.data.engines.openai_client import OpenAIClient
from draftsmith.data.engines.openai_protocol import OTHER_PROMPT, Api, BadAnswer, ModelCard
from draftsmith.data.engines.servers import Server, Servers, Throttled, Unreachable, backoff_s
from draftsmith.data.tokens.answer_spans import PROBE
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.masking import ENVIRONMENT_VARIABLE, MASK
from draftsmith.recipes.schema import Section

START_ATTEMPTS = 3


class OpenAIOptions(Section):
    """`data.distill.options` of `engine: openai`."""

    base_urls: list[str] = Field(min_length=1, description="of every server, with /v1; all serve the same model")
    model: str | None = Field(None, description="its name there; by default the only one that the servers offer")
    api: Api = Field("completions", description="`completions` sends our token ids, `chat` the messages")
    extensions: bool = Field(True, description="send vLLM's fields too; false for servers that refuse unknown ones")
    api_key_env: str | None = Field(None, description="environment variable that holds the API key")
    concurrency_per_server: int = Field(64, ge=1, description="requests in flight at each server")
    timeout_s: float = Field(600, gt=0, description="for one answer")
    max_attempts: int = Field(5, ge=1, description="of one request; waiting for a server to take it does not count")
    give_up_after_s: float = Field(600, gt=0, description="without any answer while no server can be used")

    @field_validator("base_urls")
    @classmethod
    def _distinct(cls, urls: list[str]) -> list[str]:
        urls = [url.rstrip("/") for url in urls]
        if wrong := [url for url in urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"{wrong[0]} does not begin with http:// or https://")
        try:
            bare = [str(httpx2.URL(url).copy_with(userinfo=b"")) for url in urls]
        except httpx2.InvalidURL:  # which names the place, and may quote a password there
            raise ValueError("a URL is malformed; in a password, write / as %2F and @ as %40") from None
        if len(set(bare)) < len(bare):
            raise ValueError("a server is named twice")
        return urls


class OpenAIEngine:
    """An `Engine` over HTTP."""

    Options = OpenAIOptions

    @classmethod
    def make(cls, options: OpenAIOptions, setting: EngineSetting) -> "OpenAIEngine":
        """Connect and ask every server for one token, so that wrong settings show before anything else happens.

        Raises:
            UserError: No server answers, they serve different models, or one refuses the request.
        """
        api_key = None
        if options.api_key_env is not None:
            api_key = _from_environment(options.api_key_env, "api_key_env").strip()
            if not api_key.isascii() or not api_key.isprintable():
                raise UserError(
                    f"data.distill.options.api_key_env: {options.api_key_env} holds line breaks or other characters "
                    "that no HTTP header takes: set it to the key alone"
                )
        if setting.recipe.data.distill.top_k > 0 and not options.extensions:
            raise UserError("data.distill.top_k is not of OpenAI's API: it needs data.distill.options.extensions: true")
        turns = PROBE[:1]
        trial = Request(
            key="",
            prompt_ids=prompt_token_ids(setting.tokenizer, turns),
            messages=[{"role": turn.role, "content": turn.content} for turn in turns],
            settings=GenerationSettings(max_new_tokens=1),
            seed=0,
        )
        credentials = dict(_split_credentials(url) for url in options.base_urls)
        options = options.model_copy(update={"base_urls": list(credentials)})
        client = OpenAIClient(
            options.api,
            setting.end_ids,
            max(setting.tokenizer.get_vocab().values()) + 1,
            options.extensions,
            options.timeout_s,
            api_key,
            credentials,
        )
        return cls(options, client, trial)

    def __init__(self, options: OpenAIOptions, client: OpenAIClient, trial: Request) -> None:
        self.options = options
        self.concurrency = options.concurrency_per_server * len(options.base_urls)
        self.max_length_tokens: int | None = None
        self._model = options.model
        self._client = client
        self._trial = trial
        self._finished: queue.SimpleQueue[tuple[str, Outcome] | BaseException] = queue.SimpleQueue()
        self._waiting_for = 0
        self._has_started = False
        self._at_work: set[asyncio.Task[Any]] = set()
        self._servers = Servers(options.base_urls, options.concurrency_per_server, options.give_up_after_s, self._check)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-engine", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def submit(self, request: Request) -> None:
        self._waiting_for += 1
        self._loop.call_soon_threadsafe(self._begin, request)

    def collect(self) -> list[tuple[str, Outcome]]:
        assert self._waiting_for, "nothing was submitted"
        finished = [self._finished.get()]
        while not self._finished.empty():
            finished.append(self._finished.get())
        outcomes = [item for item in finished if not isinstance(item, BaseException)]
        problem = next((item for item in finished if isinstance(item, BaseException)), None)
        if problem is not None and not outcomes:
            raise problem
        if problem is not None:  # what is there is handed over first
            self._finished.put(problem)
        self._waiting_for -= len(outcomes)
        return outcomes

    def close(self) -> None:
        """Cancel what is in flight and end the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, request: Request) -> None:
        task = self._loop.create_task(self._answer(request))
        self._at_work.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: "asyncio.Task[tuple[str, Outcome]]") -> None:
        self._at_work.discard(task)
        if not task.cancelled():
            self._finished.put(task.exception() or task.result())

    async def _shut_down(self) -> None:
        tasks = {task for task in self._at_work | self._servers.checking if not task.done()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _start(self) -> None:
        """Find the model and the servers that answer."""
        tasks = [self._loop.create_task(self._first_check(server)) for server in self._servers.all]
        self._at_work.update(tasks)  # for `close`, should one of them raise or Ctrl-C come
        checks = await asyncio.gather(*tasks)
        problems = {server: problem for server, problem in zip(self._servers.all, checks, strict=True) if problem}
        if len(problems) == len(self._servers.all):
            reasons = ", ".join(f"{server.url}: {problem}" for server, problem in problems.items())
            raise UserError(
                f"no server answers ({reasons}): start one, or correct data.distill.options.base_urls; "
                "`python -m vllm.entrypoints.openai.api_server --model ...` is one"
            )
        for server, problem in problems.items():
            self._servers.take_out(server, problem)
        self._has_started = True

    async def _first_check(self, server: Server) -> str | None:
        """A few tries; returns what the problem is, if there still is one."""
        problem = ""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                await self._check(server.url)
                return None
            except Throttled:
                return None
            except (Unreachable, BadAnswer) as error:
                problem = str(error)
            if attempt < START_ATTEMPTS:
                await asyncio.sleep(backoff_s(attempt))
        return problem

    async def _check(self, url: str) -> None:
        """Whether the server offers the model and answers a request of one token.

        Raises:
            Unreachable, Throttled, BadAnswer: It does not now.
            UserError: It will not: another model, a shorter context, a refusal.
        """
        model = self._checked_model(url, await self._client.models(url))
        outcome = await self._client.complete(url, model, self._trial)
        if outcome == Failure(OTHER_PROMPT):
            raise UserError(
                f"{url} renders `{PROBE[0].content}` by another chat template than the target's: "
                "set data.distill.options.api: completions"
            )
        if isinstance(outcome, Failure):
            raise UserError(
                f"{url} refuses a request of one token ({outcome.reason}): for a server that does not know vLLM's "
                "fields set data.distill.options.extensions: false, for one that takes no token ids api: chat"
            )

    def _checked_model(self, url: str, cards: list[ModelCard]) -> str:
        """The model's name; the first server that is asked decides, and those at the start bound the length."""
        offered = {card.id: card.max_model_len for card in cards}
        names = ", ".join(offered) or "no model"
        if self._model is None and len(offered) == 1:
            self._model = next(iter(offered))
        if self._model is None:
            raise UserError(f"{url} offers {names}: name one in data.distill.options.model")
        if self._model not in offered:
            raise UserError(f"{url} serves {names}, not {self._model}: every server must serve the same model")
        longest, bound = offered[self._model], self.max_length_tokens
        if longest is not None and (bound is None or longest < bound):
            if self._has_started and bound is not None:
                raise UserError(f"{url} takes {longest} tokens, the other servers {bound}")
            self.max_length_tokens = longest
        return self._model

    async def _answer(self, request: Request) -> tuple[str, Outcome]:
        """Ask until there is an outcome, another server after each bad answer if there is one."""
        assert self._model is not None
        attempts, avoid = 0, set[Server]()
        while True:
            server = await self._servers.acquire(request.key, avoid)
            sent_at = time.monotonic()
            try:
                outcome = await self._client.complete(server.url, self._model, request)
            except Throttled as problem:
                server.throttle(problem.retry_after_s, sent_at)
                continue
            except Unreachable as problem:
                self._servers.take_out(server, str(problem))
                if not problem.was_sent:
                    continue
                reason = "connection lost"
            except BadAnswer as problem:
                self._servers.gave_bad_answer(server, problem)
                reason = str(problem)
            else:
                self._servers.answered(server, request.key)
                return request.key, outcome
            finally:
                self._servers.release(server)
            attempts += 1
            if attempts >= self.options.max_attempts:
                return request.key, Failure(reason)
            avoid.add(server)
            await asyncio.sleep(backoff_s(attempts))


def _from_environment(name: str, option: str) -> str:
    """What the variable holds. A name that is none is taken for the secret itself, and not shown."""
    if not os.environ.get(name):
        shown = name if name.isidentifier() else "that is named there: give a variable's name, not what it holds"
        raise UserError(f"data.distill.options.{option}: the environment has no variable {shown}")
    return os.environ[name]


def _split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """The URL as it may be shown, and the user and password that stood in it, from the environment if it says so."""
    address = httpx2.URL(url)
    if not address.userinfo:
        return url, None
    parts = (address.username, address.password)
    if MASK in parts:
        raise UserError(
            "data.distill.options.base_urls: this recipe was written without the passwords of its servers: give the "
            "URLs on the command line, 'data.distill.options.base_urls=[\"https://me:$PASSWORD@host/v1\"]'"
        )
    user, password = (
        ENVIRONMENT_VARIABLE.sub(lambda variable: _from_environment(variable[1], "base_urls"), part) for part in parts
    )
    return str(address.copy_with(userinfo=b"")), (user, password)


ENGINE = OpenAIEngine
