"""Answers from one or more servers with OpenAI's API (vLLM, SGLang, llama.cpp, ...).

    data:
      distill:
        engine: openai
        options: {base_urls: ["http://node1:8000/v1", "http://node2:8000/v1"]}

A server with a password is given as `https://me:$PASSWORD@host/v1`: the password comes from the environment and is
written to no file.

The `openai` client handles HTTP: it retries after a 429, a 5xx or a broken connection, and waits as `Retry-After` says.
An event loop in a separate thread runs `concurrency_per_server` workers for each server, which take requests from one
queue. A server whose connection is lost, or that fails several times in a row, is left out and its requests go back
into the queue; it is used again once it answers a request of one token.

Responses are limited in time and size, and checked as far as possible (`openai_answers`).

`extensions` are request fields of vLLM and others that OpenAI's API lacks: the tokens that end an answer, returning
token ids, and using the recipe's sampling alone (vLLM fills settings that a request omits with the top-k and the
penalties of the model's generation_config.json).
"""

import asyncio
import base64
import queue
import sys
import threading
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, ClassVar

import httpx2
import openai
from pydantic import Field, field_validator
from tqdm import tqdm

from draftsmith.data.engines.engine import Completion, EngineSetting, Failure, GenerationSettings, Outcome, Request
from draftsmith.data.engines.openai_answers import (
    OTHER_PROMPT,
    Api,
    BoundedClient,
    RequestRefused,
    ServerFailure,
    Vocabulary,
    read_answer,
    redirected_to,
    refusal_reason,
)
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.tokens.templates import PROBE, joined_thoughts
from draftsmith.errors import ENVIRONMENT_VARIABLE, MASK, UserError, read_api_key, read_secret
from draftsmith.recipes.schema import Section

NO_KEY = "none"  # servers without a key ignore it; without one the client would send OPENAI_API_KEY
CONNECT_TIMEOUT_S = 10.0
FAILURES_IN_A_ROW = 3
PROBE_PAUSE_S = 5.0  # between two checks of a server that was left out
# These concern one request. All others from 400 on concern all requests.
REQUEST_REFUSED = {400, 413, 422, 451}
TOOLS_IN_CHAT = "a conversation with tools needs data.distill.options.api: completions"
THOUGHTS_APART = "the server gives reasoning_content, which the target's chat template does not write"


class OpenAIOptions(Section):
    """`data.distill.options` of `engine: openai`."""

    answer_keys: ClassVar[set[str]] = {"model", "api"}
    base_urls: list[str] = Field(
        min_length=1, description="URL of every server, ending in /v1; all must serve the same model"
    )
    model: str | None = Field(
        None, description="name of the model on the servers; by default the only one that they offer"
    )
    api: Api = Field("completions", description="API to use: `completions` sends token ids, `chat` sends the messages")
    extensions: bool = Field(
        True,
        description="also send the request fields that only vLLM has; false for servers that reject unknown fields",
    )
    api_key_env: str | None = Field(None, description="name of the environment variable that holds the API key")
    concurrency_per_server: int = Field(64, ge=1, description="number of concurrent requests to each server")
    timeout_s: float = Field(600, gt=0, description="seconds for one answer, from its request to its last byte")
    max_attempts: int = Field(
        5,
        ge=1,
        description="number of times that a request is sent before its conversation fails; each time the client "
        "itself retries twice",
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
            bare = [str(httpx2.URL(url).copy_with(userinfo=b"")) for url in urls]
        except httpx2.InvalidURL:  # its message may quote a password
            raise ValueError("a URL is malformed; in a password, write / as %2F and @ as %40") from None
        if len(set(bare)) < len(bare):
            raise ValueError("the same server is listed twice")
        return urls


class Server:
    """One base URL with its client. `usable` is cleared while the server is left out."""

    def __init__(self, url: str, client: openai.AsyncOpenAI) -> None:
        self.url, self.client = url, client
        self.usable = asyncio.Event()
        self.failures = 0
        self.problem = ""


class OpenAIEngine:
    """An `Engine` that sends requests to servers over HTTP.

    Args:
        options: Options of the engine; `base_urls` may hold passwords.
        setting: The recipe and target.

    Raises:
        UserError: No server answers, they serve different models, or one rejects a request of one token.
    """

    Options = OpenAIOptions
    retries = 2  # by the client, within each attempt
    asks_trial = True  # send a request of one token first, so that wrong settings show early
    start_command = "python -m vllm.entrypoints.openai.api_server --model"  # of a server, for messages

    @classmethod
    def make(cls, options: OpenAIOptions, setting: EngineSetting) -> "OpenAIEngine":
        return cls(options, setting)

    @staticmethod
    def option(name: str) -> str:
        """Return the recipe key of an option, for messages."""
        return f"data.distill.options.{name}"

    def __init__(self, options: OpenAIOptions, setting: EngineSetting) -> None:
        if setting.recipe.data.distill.top_k > 0 and not options.extensions:
            raise UserError(
                "OpenAI's API has no top_k, as data.distill.top_k sets it: use a vLLM server with "
                f"{self.option('extensions')}: true"
            )
        self._template_kwargs = setting.recipe.target.chat_template_kwargs
        if self._template_kwargs and options.api == "chat" and not options.extensions:
            raise UserError(
                "OpenAI's chat API takes no target.chat_template_kwargs: use a vLLM server with "
                f"{self.option('extensions')}: true, or {self.option('api')}: completions"
            )
        self._tokenizer = setting.tokenizer
        turns = PROBE[:1]
        self._trial = Request(
            key="",
            prompt_ids=prompt_token_ids(setting.tokenizer, turns),
            messages=[{"role": turn.role, "content": turn.content} for turn in turns],
            settings=GenerationSettings(max_new_tokens=1),
            seed=0,
        )
        self.options = options
        self.concurrency = options.concurrency_per_server * len(options.base_urls)
        self.max_length_tokens: int | None = None
        self._model = options.model
        self._vocabulary = Vocabulary.of(setting)
        variable = options.api_key_env
        self._api_key = None if variable is None else read_api_key(variable, self.option("api_key_env"))
        self._waiting: asyncio.Queue[tuple[Request, int]] = asyncio.Queue()  # with the attempts so far
        self._finished: queue.SimpleQueue[tuple[str, Outcome] | BaseException] = queue.SimpleQueue()
        self._in_flight = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._giving_up: asyncio.TimerHandle | None = None
        self._out_since_s: float | None = None  # event loop's time since when no server could be used
        self._servers = [self._connect(url) for url in options.base_urls]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-engine", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def submit(self, request: Request) -> None:
        self._in_flight += 1
        self._loop.call_soon_threadsafe(self._waiting.put_nowait, (request, 0))

    def collect(self) -> list[tuple[str, Outcome]]:
        assert self._in_flight, "nothing was submitted"
        outcomes: list[tuple[str, Outcome]] = []
        while not outcomes or not self._finished.empty():
            item = self._finished.get()
            if isinstance(item, BaseException):
                if not outcomes:
                    raise item
                self._finished.put(item)  # return the outcomes before raising the error
                break
            outcomes.append(item)
        self._in_flight -= len(outcomes)
        return outcomes

    def close(self) -> None:
        """Cancel requests in flight and end the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut_down(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            await server.client.close()

    def _connect(self, url: str) -> Server:
        address, login = self._split_credentials(url)
        client = openai.AsyncOpenAI(
            base_url=address,
            api_key=self._api_key or NO_KEY,
            max_retries=self.retries,
            http_client=BoundedClient(self.options.timeout_s),
            timeout=openai.Timeout(self.options.timeout_s, connect=min(CONNECT_TIMEOUT_S, self.options.timeout_s)),
            default_headers={} if login is None else {"Authorization": login},
        )
        return Server(address, client)

    async def _start(self) -> None:
        """Check every server, then start the workers."""
        problems = await asyncio.gather(*map(self._check, self._servers), return_exceptions=True)
        for server, problem in zip(self._servers, problems, strict=True):
            if problem is not None and not isinstance(problem, ServerFailure):
                raise problem
            server.problem = str(problem or "")
            server.usable.set()
        if all(problems):
            raise UserError(
                f"no server answers ({self._problems()}): start one, as with `{self.start_command} ...`, or correct "
                f"{self.option('base_urls')}"
            )
        for server in self._servers:
            if server.problem:
                self._leave_out(server, server.problem)
            workers = range(self.options.concurrency_per_server)
            self._tasks += [self._loop.create_task(self._work(server)) for _ in workers]

    async def _work(self, server: Server) -> None:
        """Take requests from the queue while the server can be used."""
        while True:
            await server.usable.wait()
            request, attempts = await self._waiting.get()
            if not server.usable.is_set():  # it was left out while this worker waited
                self._waiting.put_nowait((request, attempts))
                continue
            try:
                self._finished.put((request.key, await self.complete(server, request)))
                server.failures, self._out_since_s = 0, None
            except ServerFailure as problem:
                server.failures += 1
                if problem.is_unreachable or server.failures >= FAILURES_IN_A_ROW:
                    self._leave_out(server, str(problem))
                attempts += not problem.is_throttled
                if attempts >= self.options.max_attempts:
                    self._finished.put((request.key, Failure(str(problem))))
                else:
                    self._waiting.put_nowait((request, attempts))
            except Exception as error:  # raised again by `collect`
                self._finished.put(error)

    def _leave_out(self, server: Server, problem: str) -> None:
        """Send no more requests to this server until it answers again."""
        server.problem = problem
        if not server.usable.is_set():
            return
        server.usable.clear()
        self._tasks.append(self._loop.create_task(self._use_again(server)))
        if any(other.usable.is_set() for other in self._servers):
            warn(f"{server.url}: {problem}; its requests go to the other servers")
            return
        # A server counts as usable again only when it answers more than its check, and not HTTP 429.
        now_s = self._loop.time()
        self._out_since_s = now_s if self._out_since_s is None else self._out_since_s
        pause_s = max(0.0, self._out_since_s + self.options.give_up_after_s - now_s)
        warn(f"no server answers ({self._problems()}): waiting up to {pause_s:.3g} s for one to come back")
        self._giving_up = self._loop.call_later(
            pause_s, lambda: self._finished.put(UserError(self._no_server_message()))
        )

    async def _use_again(self, server: Server) -> None:
        """Check a server that was left out until it answers, then use it again."""
        while server.problem:
            await asyncio.sleep(PROBE_PAUSE_S)
            try:
                await self._check(server)
                server.problem = ""
            except (ServerFailure, UserError) as problem:
                server.problem = str(problem)
        warn(f"{server.url} answers again")
        if self._giving_up is not None:
            self._giving_up.cancel()
        server.failures = FAILURES_IN_A_ROW - 1  # the next failure takes it out again
        server.usable.set()

    def _no_server_message(self) -> str:
        return (
            f"no server has answered for {self.options.give_up_after_s:g} s ({self._problems()}): start one again and "
            "run the same command; nothing that was written is lost"
        )

    def _problems(self) -> str:
        """Describe the problem of each server."""
        return ", ".join(f"{server.url}: {server.problem}" for server in self._servers)

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
        names = ", ".join(map(str, offered)) or "no model"
        if self._model is None and len(offered) == 1:
            self._model = next(iter(offered))
        if self._model is None:
            raise UserError(f"{server.url} offers {names}: name one in {self.option('model')}")
        if self._model not in offered:
            raise UserError(f"{server.url} serves {names}, not {self._model}: every server must serve the same model")
        outcome = await self.complete(server, self._trial) if self.asks_trial else None
        if outcome == Failure(OTHER_PROMPT):
            raise UserError(
                f"{server.url} renders `{PROBE[0].content}` with another chat template than the "
                f"target's: set {self.option('api')}: completions"
            )
        if isinstance(outcome, Failure):
            raise UserError(
                f"{server.url} refuses a request of one token ({outcome.reason}): for a server that does not know "
                f"vLLM's fields set {self.option('extensions')}: false, for a server that takes no token ids set "
                "api: chat"
            )
        longest, bound = offered[self._model], self.max_length_tokens
        if isinstance(longest, int) and (bound is None or longest < bound):
            if self._tasks and bound is not None:
                raise UserError(
                    f"{server.url} takes sequences of {longest} tokens, the other servers {bound}: start it with the "
                    "same limit"
                )
            self.max_length_tokens = longest

    async def complete(self, server: Server, request: Request) -> Outcome:
        """Send a request to a server and return its outcome.

        Raises:
            ServerFailure: The server does not answer, or its response is malformed.
            UserError: The server rejects the key, the URL or the model, which all requests share.
        """
        api = self.options.api
        if request.tools and api == "chat":  # where servers read calls each in its own way, or not at all
            return Failure(TOOLS_IN_CHAT)
        endpoint: Any = server.client.completions if api == "completions" else server.client.chat.completions
        try:
            response = await self.response(server, endpoint.with_raw_response.create(**self.arguments(request)))
        except RequestRefused as refusal:
            return Failure(str(refusal), is_final=True)
        outcome = read_answer(response.content, request, api, self._vocabulary)
        return self._with_thoughts(outcome) if isinstance(outcome, Completion) and outcome.thoughts else outcome

    def _with_thoughts(self, answer: Completion) -> Outcome:
        """Put thoughts that the server returned in a separate field before the text, as the target generates them."""
        content = answer.text or ""
        joined = joined_thoughts(self._tokenizer, answer.thoughts, content) if content.strip() else content
        return Failure(THOUGHTS_APART) if joined is None else replace(answer, text=joined, thoughts="")

    def arguments(self, request: Request) -> dict[str, Any]:
        """Return the arguments of the client's `completions.create` or `chat.completions.create`."""
        settings = request.settings
        arguments: dict[str, Any] = {
            "model": self._model,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
        }
        is_chat = self.options.api == "chat"
        # The client would check each token id of a `prompt` argument, which takes five times as long as all the rest.
        body: dict[str, Any] = {} if is_chat else {"prompt": request.prompt_ids}
        arguments |= {"messages": request.messages} if is_chat else {"prompt": ""}
        if settings.temperature > 0:
            arguments["seed"] = request.seed
        if self.options.extensions:
            body |= {
                "top_k": settings.top_k or -1,
                "stop_token_ids": list(self._vocabulary.end_ids),
                "return_token_ids": True,
            }
            body |= {"chat_template_kwargs": self._template_kwargs} if is_chat and self._template_kwargs else {}
            body |= {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return arguments | {"extra_body": body}

    async def response(self, server: Server, call: Awaitable[Any]) -> Any:
        """Await a call of the client and translate its errors.

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
            raise ServerFailure(f"no connection ({error.__cause__ or error})", is_unreachable=True) from None
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

    def _split_credentials(self, url: str) -> tuple[str, str | None]:
        """Return the URL without user and password, and the header for these."""
        address = httpx2.URL(url)
        if not address.userinfo:
            return url, None
        parts = (address.username, address.password)
        if MASK in parts:
            raise UserError(
                f"{self.option('base_urls')}: draftsmith removed the servers' passwords when it stored this recipe: "
                "give the URLs again on the command line, 'data.distill.options.base_urls=[\"https://me:$PASSWORD@host/v1\"]'"
            )
        login = ":".join(
            ENVIRONMENT_VARIABLE.sub(lambda found: read_secret(found[1], self.option("base_urls")), part)
            for part in parts
        )
        return str(address.copy_with(userinfo=b"")), "Basic " + base64.b64encode(login.encode()).decode()


def warn(message: str) -> None:
    """Print a line on stderr without breaking a progress bar."""
    tqdm.write(f"warning: {message}", file=sys.stderr)


ENGINE = OpenAIEngine
