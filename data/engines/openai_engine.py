"""Answers from one or more servers with OpenAI's API (vLLM, SGLang, llama.cpp, ...).

    data:
      distill:
        engine: openai
        options: {base_urls: ["http://node1:8000/v1", "http://node2:8000/v1"]}

The `openai` client handles HTTP: it retries after a 429, a 5xx or a broken connection, and waits as `Retry-After` says.
A request goes to the server with the fewest requests, at most `concurrency_per_server` at a time; if that server fails,
it goes to the next one. So a dead server delays its requests only until they fail, and a server that comes back gets
requests again.

Responses are limited in time and size, and checked as far as possible (`openai_answers`).
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import openai
from pydantic import Field, field_validator
from tqdm import tqdm

from draftsmith.data.engines.answer_features import AnswerFeatures
from draftsmith.data.engines.engine import (
    Completion,
    EngineSetting,
    Failure,
    GenerationSettings,
    Outcome,
    Request,
)
from draftsmith.data.engines.openai_answers import (
    BoundedClient,
    RequestRefused,
    ServerFailure,
    Vocabulary,
    one_line,
    read_answer,
    redirected_to,
    refusal_reason,
)
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.tokens.templates import PROBE
from draftsmith.errors import UserError, read_api_key
from draftsmith.recipes.schema import Section

NO_KEY = "none"  # servers without a key ignore it; without one the client would send OPENAI_API_KEY
# These concern one request. All others from 400 on concern all requests.
REQUEST_REFUSED = {400, 413, 422, 451}


class OpenAIOptions(Section):
    """Options of `engine: openai`, set in a recipe by `data.distill.options`."""

    answer_keys: ClassVar[set[str]] = {"model"}
    base_urls: list[str] = Field(
        min_length=1, description="URL of every server, ending in /v1; all must serve the same model"
    )
    model: str | None = Field(
        None, description="name of the model on the servers; by default the only one that they offer"
    )
    api_key_env: str | None = Field(None, description="name of the environment variable that holds the API key")
    concurrency_per_server: int = Field(64, ge=1, description="number of concurrent requests to each server")
    timeout_s: float = Field(600, gt=0, description="seconds for one answer, from its request to its last byte")
    max_attempts: int = Field(
        5,
        ge=1,
        description="number of times that a request is sent before its conversation fails; each time the `openai` "
        "client itself retries twice",
    )
    give_up_after_s: float = Field(
        600, gt=0, description="seconds without any reachable server after which distillation stops"
    )

    @field_validator("base_urls")
    @classmethod
    def _check_urls(cls, urls: list[str]) -> list[str]:
        urls = [url.rstrip("/") for url in urls]
        if wrong := [url for url in urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"{wrong[0]} does not begin with http:// or https://")
        try:
            has_login = any(httpx2.URL(url).userinfo for url in urls)
        except httpx2.InvalidURL:  # its message may quote a password
            raise ValueError("a URL is malformed") from None
        if has_login:
            raise ValueError("a URL may not hold a login: give the servers' key by `api_key_env`")
        if len(set(urls)) < len(urls):
            raise ValueError("the same server is listed twice")
        return urls


class Server:
    """One server: its base URL and client.

    requests: number of requests that it works on or that wait for it. slots: semaphore of its concurrent requests.
    problem: why its last request failed; empty if it was answered.
    """

    def __init__(self, url: str, client: openai.AsyncOpenAI, concurrency: int) -> None:
        self.url, self.client, self.slots = url, client, asyncio.Semaphore(concurrency)
        self.requests, self.problem = 0, ""


class OpenAIEngine:
    """An `Engine` that sends requests to servers over HTTP, while `collect` waits.

    Args:
        options: Options of the engine.
        setting: Recipe, tokenizer and end tokens of the target.

    Raises:
        UserError: No server answers, they serve different models, or one rejects a request of one token.
    """

    Options = OpenAIOptions
    retries = 2  # by the client, within each attempt
    connect_timeout_s = 10.0
    asks_trial = True  # send a request of one token first, so that wrong settings show early
    start_command = "python -m vllm.entrypoints.openai.api_server --model"  # of a server, for messages

    @classmethod
    def make(cls, options: OpenAIOptions, setting: EngineSetting) -> "OpenAIEngine":
        return cls(options, setting)

    @staticmethod
    def option(name: str) -> str:
        """Return the recipe key of an engine option, for messages."""
        return f"data.distill.options.{name}"

    def __init__(self, options: OpenAIOptions, setting: EngineSetting) -> None:
        self.options, self._vocabulary = options, Vocabulary(setting)
        self._trial = Request(
            key="",
            prompt_ids=prompt_token_ids(setting.tokenizer, PROBE[:1]),
            settings=GenerationSettings(max_new_tokens=1),
            seed=0,
        )
        self.concurrency = options.concurrency_per_server * len(options.base_urls)
        self.max_length_tokens: int | None = None
        self._model = options.model
        self.features: AnswerFeatures | None = None
        if setting.features is not None:
            data = setting.recipe.data
            served, keeps_cut = Path(data.features.server.folder), data.distill.cut_answers == "keep"
            self.features = AnswerFeatures(served, setting.features, data.max_length_tokens, keeps_cut)
        variable = options.api_key_env
        self._api_key = None if variable is None else read_api_key(variable, self.option("api_key_env"))
        self._answers: set[asyncio.Task[tuple[str, Outcome]]] = set()  # in flight, or not collected yet
        self._failing_since_s: float | None = None  # event loop's time of the first failure after the last answer
        self._loop = asyncio.new_event_loop()
        self._servers = [self._connect(url) for url in options.base_urls]
        try:
            self.run(self._check_all())
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the engine's event loop, which runs at no other time, and return its result."""
        return self._loop.run_until_complete(coroutine)

    def submit(self, request: Request) -> None:
        self._answers.add(self._loop.create_task(self._answer(request)))

    def collect(self) -> list[tuple[str, Outcome]]:
        assert self._answers, "nothing was submitted"
        done, _ = self.run(asyncio.wait(self._answers, return_when=asyncio.FIRST_COMPLETED))
        answered = {task for task in done if task.exception() is None} or done  # outcomes first, then an error
        self._answers -= answered
        return [task.result() for task in answered]

    def close(self) -> None:
        """Cancel requests in flight; a second call does nothing."""
        if self._loop.is_closed():
            return
        if self.features is not None and (lost := self.features.lost):
            warn(f"hidden states of {len(lost)} answers are missing ({lost[-1]}): training will request them")
        self.run(self._shut_down())
        self._loop.close()

    async def _shut_down(self) -> None:
        for task in self._answers:
            task.cancel()
        await asyncio.gather(*self._answers, return_exceptions=True)
        for server in self._servers:
            await server.client.close()

    def _connect(self, url: str) -> Server:
        client = openai.AsyncOpenAI(
            base_url=url,
            api_key=self._api_key or NO_KEY,
            max_retries=self.retries,
            http_client=BoundedClient(self.options.timeout_s),
            timeout=openai.Timeout(self.options.timeout_s, connect=min(self.connect_timeout_s, self.options.timeout_s)),
        )
        return Server(url, client, self.options.concurrency_per_server)

    async def _check_all(self) -> None:
        """Check every server.

        Raises:
            UserError: None answers, or one cannot be used, see `_check`.
        """
        problems = await asyncio.gather(*map(self._check, self._servers), return_exceptions=True)
        for server, problem in zip(self._servers, problems, strict=True):
            if problem is not None and not isinstance(problem, ServerFailure):
                raise problem
            self._note(server, str(problem or ""))
        if all(problems):
            reasons = ", ".join(f"{server.url}: {server.problem}" for server in self._servers)
            raise UserError(
                f"no server answers ({reasons}): start one, as with `{self.start_command} ...`, or correct "
                f"{self.option('base_urls')}"
            )

    async def _answer(self, request: Request) -> tuple[str, Outcome]:
        """Send a request to one server after the other until one answers it; return its key and outcome.

        Raises:
            UserError: No server has answered for `give_up_after_s`, or one rejects what all requests share.
        """
        attempts = Counter[Server]()
        counted, reason = 0, ""  # attempts that the server's connection or its load did not end
        while counted < self.options.max_attempts:
            server = min(self._servers, key=lambda each: (attempts[each], each.requests))
            attempts[server] += 1
            server.requests += 1
            try:
                async with server.slots:
                    outcome = await self.complete(server, request)
                self._note(server, "")
                self._failing_since_s = None
                return request.key, outcome
            except ServerFailure as failure:
                reason = str(failure)
                counted += not (failure.is_unreachable or failure.is_throttled)
                self._note(server, reason if failure.is_unreachable else server.problem)
                now_s = self._loop.time()
                self._failing_since_s = now_s if self._failing_since_s is None else self._failing_since_s
                if now_s - self._failing_since_s > self.options.give_up_after_s:
                    raise UserError(self._no_server_message(f"{server.url}: {reason}")) from None
            finally:
                server.requests -= 1
        return request.key, Failure(reason)

    def _note(self, server: Server, problem: str) -> None:
        """Remember why a server does not answer, and print when that begins and ends."""
        if bool(problem) != bool(server.problem):
            warn(f"{server.url}: {problem}" if problem else f"{server.url} answers again")
        server.problem = problem

    def _no_server_message(self, failure: str) -> str:
        return (
            f"no server has answered for {self.options.give_up_after_s:g} s ({failure}): start one again and run the "
            "same command; nothing that was written is lost"
        )

    async def _check(self, server: Server) -> None:
        """Check that the server offers the model and answers a request of one token.

        Raises:
            ServerFailure: The server does not answer now.
            UserError: The server cannot be used: it offers another model or a shorter context, or refuses the request.
        """
        try:
            page = await self.response(server, server.client.models.list())
            offered = {card.id: (card.model_extra or {}).get("max_model_len") for card in page.data}
        except RequestRefused as refusal:
            raise UserError(
                f"{server.url}/models is refused ({refusal}): check {self.option('base_urls')} and "
                f"{self.option('api_key_env')}"
            ) from None
        except (AttributeError, TypeError, ValueError):
            raise ServerFailure("malformed list of models") from None
        names = one_line(", ".join(map(str, offered))) or "no model"
        if self._model is None and len(offered) == 1:
            self._model = next(iter(offered))
        if self._model is None:
            raise UserError(f"{server.url} offers {names}: set {self.option('model')} to one")
        if self._model not in offered:
            ours = one_line(self._model)
            raise UserError(f"{server.url} serves {names}, not {ours}: every server must serve the same model")
        outcome = await self.complete(server, self._trial) if self.asks_trial else None
        if isinstance(outcome, Failure):
            raise UserError(
                f"{server.url} refuses a request of one token ({outcome.reason}): a server must take token ids as the "
                "prompt, and fields that only vLLM has, as vLLM, SGLang and llama-server do"
            )
        longest, bound = offered[self._model], self.max_length_tokens
        if isinstance(longest, int) and (bound is None or longest < bound):
            self.max_length_tokens = longest

    async def complete(self, server: Server, request: Request) -> Outcome:
        """Send a request to a server and return its outcome.

        Raises:
            ServerFailure: The server does not answer, or its response is malformed.
            UserError: The server rejects the key, the URL or the model, which all requests share.
        """
        endpoint: Any = server.client.completions.with_raw_response
        try:
            response = await self.response(server, endpoint.create(**self.arguments(request)))
        except RequestRefused as refusal:
            return Failure(str(refusal), is_final=True)
        outcome = read_answer(response.content, request, self._vocabulary)
        if self.features is not None and isinstance(outcome, Completion):
            written = (json.loads(response.content).get("kv_transfer_params") or {}).get("hidden_states_path")
            await asyncio.to_thread(self.features.take, written, request, outcome, request is not self._trial)
        return outcome

    def arguments(self, request: Request) -> dict[str, Any]:
        """Return the arguments of the `openai` client's `completions.create`.

        They include fields of vLLM and others that OpenAI's API lacks: the tokens that end an answer, the wish for
        token ids, and the recipe's sampling alone (vLLM fills settings that a request omits with the top-k and the
        penalties of the model's generation_config.json).
        """
        settings = request.settings
        body: dict[str, Any] = {
            # The client would check each token id of a `prompt` argument, which takes five times as long as the rest.
            "prompt": request.prompt_ids,
            "top_k": settings.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(self._vocabulary.end_ids),
            "return_token_ids": True,
        }
        arguments: dict[str, Any] = {
            "model": self._model,
            "prompt": "",
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "extra_body": body,
        }
        if settings.temperature > 0:
            arguments["seed"] = request.seed
        if self.features is not None:
            body["kv_transfer_params"] = {"include_output_tokens": True}
        return arguments

    async def response(self, server: Server, call: Awaitable[Any]) -> Any:
        """Await a call of the `openai` client and translate its errors.

        Raises:
            RequestRefused: The server rejects this request.
            ServerFailure: The server fails at the moment.
            UserError: The server would reject every request.
        """
        try:
            return await call
        except openai.APITimeoutError:
            raise ServerFailure("timeout") from None
        except openai.APIConnectionError as error:
            reason = one_line(str(error.__cause__ or error))
            raise ServerFailure(f"no connection ({reason})", is_unreachable=True) from None
        except openai.APIStatusError as error:
            status, reason = error.status_code, refusal_reason(error, self._api_key)
            if status in REQUEST_REFUSED:
                raise RequestRefused(reason) from None
            if 300 <= status < 400:
                raise UserError(
                    f"{server.url} redirects to {redirected_to(error.response)} (HTTP {status}), which is not "
                    f"followed: put the final address into {self.option('base_urls')}"
                ) from None
            if status < 400 or status in (408, 409, 429) or status >= 500:
                raise ServerFailure(reason, is_throttled=status == 429) from None
            raise UserError(
                f"{server.url} says {reason}: check {self.option('base_urls')} (usually with /v1 at the end), "
                f"{self.option('model')} and {self.option('api_key_env')}"
            ) from None


def warn(message: str) -> None:
    """Print a warning line on stderr without breaking a progress bar."""
    tqdm.write(f"warning: {message}", file=sys.stderr)


ENGINE = OpenAIEngine
