"""`draftsmith serve`: OpenAI's API over our own decoding loop, for ParallelSpec's masks and draft trees.

While one answer runs alone it is drafted and verified. Several answers share each forward of the target, with one token
per answer and without drafts: reading the weights once for all of them gains more than drafting, which would cost more
arithmetic and a drafter's forward per sequence. Further requests wait in a queue of bounded length; when it is full,
requests get HTTP 429. Answers whose client has disconnected are cancelled. Greedy answers equal the target's, and
sampled ones have its distribution, with and without drafts.

Extension of OpenAI's API: every streamed piece, and a whole answer, has a field `draftsmith` with the number of
accepted draft tokens and their text. Unsupported fields are rejected with HTTP 400, never ignored.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import queue
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.exceptions import HTTPException as AnyHTTPException
from torch import Tensor

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids
from draftsmith.errors import UserError, reason
from draftsmith.eval.bench.costs import MeasuredCosts
from draftsmith.eval.bench.measured_methods import compile_decoder, load_models
from draftsmith.eval.decoding.loop import Answering, AnswerRecord, Round
from draftsmith.eval.decoding.method import ReadsLogits
from draftsmith.eval.decoding.shared_session import SharedSession
from draftsmith.eval.decoding.stop_strings import UNFINISHED, GrowingText, StopStrings
from draftsmith.eval.methods.drafter import TreeDrafter, build_tree_drafter
from draftsmith.eval.serving.protection import Guard, TimedRequests, error, page_response
from draftsmith.eval.serving.requests import Asked, ChatAsked, CompletionAsked, TooLong, ids_of_text, ids_of_turns
from draftsmith.eval.trees.verify import Sampling, root_only
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.cpu_kernels import pack_linears
from draftsmith.models.target.loading import session_tokens
from draftsmith.recipes.schema import Recipe

PAGE = Path(__file__).with_name("page.html")
LONGEST_TOKENS = 4096  # of a prompt with its answer, unless the target's context is shorter
MOST_CONNECTIONS = 256
STOPS_WITHIN_S = 0.5  # how long an idle worker waits for a job before it checks for `stop`
LAST_WORDS_S = 2  # grace period of open connections at shutdown

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


# ---- jobs and answers ----


@dataclass
class Piece:
    """Text that a round added to an answer.

    drafted: the beginning of `text` that accepted draft tokens gave. tokens, accepted: number of all new tokens, and of
    accepted draft tokens among them.
    """

    text: str
    drafted: str = ""
    tokens: int = 0
    accepted: int = 0


@dataclass
class Finished:
    """A complete answer, for the client and for `on_answer`."""

    prompt_ids: list[int]
    record: AnswerRecord
    reason: str
    text: str


@dataclass
class Job:
    """A queued or running request. The worker passes results to `put` and checks `gone` every round.

    put: gets the pieces, then the complete answer or an error. gone: set when the client has disconnected.
    streamed: False: `put` gets no pieces, each of which would wake the listening thread.
    """

    prompt_ids: list[int]
    new_tokens: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...]
    put: Callable[[Piece | Finished | BaseException], object]
    gone: threading.Event = field(default_factory=threading.Event)
    streamed: bool = True


@dataclass
class Running:
    """An answer that is being generated.

    number: its sequence in the session. layers: feature layers of the drafter at its start. features: of the committed
    tokens, from these layers, as tensors [n, F] in order. counted: False for warm-up. method: drafts while no other
    answer runs; None if it has not read the whole sequence.
    """

    job: Job
    number: int
    answer: Answering
    generator: torch.Generator
    pieces: Pieces
    layers: tuple[int, ...]
    features: list[Tensor]
    began_s: float
    counted: bool = True
    method: TreeDrafter | None = None
    texts: list[str] = field(default_factory=list)

    def say(self, piece: Piece) -> None:
        """Add a piece to the answer's text, and send it if the answer is streamed."""
        self.texts.append(piece.text)
        if self.job.streamed:
            self.job.put(piece)

    @property
    def newest(self) -> int:
        """The newest token, which is not in the KV cache yet."""
        return self.answer.record.ids[-1]


class Gone(Exception):
    """Raised or sent when an answer is cancelled: its client has disconnected, or the server stops."""


class Worker:
    """Generates the answers of all jobs, several concurrently, with one session.

    Run it in the thread that loaded the models: OpenMP starts a team of threads for every thread that computes, and
    with more threads than processors no thread spins while it waits, which costs two thirds of the speed (68 instead of
    186 tokens/s with SmolLM2 on two cores).

    Args:
        recipe: Its first method drafts.
        waiting: Length of the queue.
        on_answer: Called with every complete answer.
        newer: Called before every answer; returns the folder of another drafter to serve from then on, or None.
        at_once: Number of concurrent answers, each with its KV cache.

    Raises:
        UserError: The target or the drafter cannot be loaded.
    """

    def __init__(
        self,
        recipe: Recipe,
        waiting: int,
        on_answer: Callable[[Finished], None] | None = None,
        newer: Callable[[], Path | None] = lambda: None,
        at_once: int = 1,
    ) -> None:
        self.recipe, self.on_answer, self._newer = recipe, on_answer, newer
        self.target, self.tokenizer, drafters = load_models(recipe)
        ((_, self.drafter),) = drafters.items()
        self.length = session_tokens(self.target, LONGEST_TOKENS)
        self.end_ids = frozenset(answer_end_ids(self.target.generation_config, self.tokenizer))
        self.jobs: queue.Queue[Job] = queue.Queue(waiting)
        self._stopping = threading.Event()
        self._running = list[Running]()
        self.registry = CollectorRegistry()
        named: dict[str, Any] = {"namespace": "draftsmith", "registry": self.registry}
        self.rounds = Counter("rounds", "Rounds of draft and verification", **named)
        self.drafted = Counter("draft_tokens", "Tokens drafted along the longest path", **named)
        self.accepted = Counter("accepted_tokens", "Drafted tokens that were accepted", **named)
        self.by_position = Counter("accepted_tokens_per_pos", "Accepted tokens by position", ["position"], **named)
        self.generated = Counter("generation_tokens", "Tokens of all answers", **named)
        self.answers = Counter("answers", "Answers by how they ended", ["reason"], **named)
        self.seconds = Counter("generation_seconds", "Seconds from a request's turn to its last token", **named)
        self.drafters = Counter("drafters_taken", "Changes of the serving drafter", **named)
        self.not_kept = Counter("answers_not_kept", "Answers that could not be stored for training", **named)
        self._keeps = True
        Gauge("queue_requests", "Waiting requests", **named).set_function(self.jobs.qsize)
        Gauge("running_requests", "Running requests", **named).set_function(lambda: len(self._running))
        self._session = SharedSession(self.target, self.length, at_once, recipe.eval.compile)
        self._decoder = compile_decoder(recipe, self.drafter.decoder(self.length))
        self._greeting = prompt_token_ids(self.tokenizer, [Turn("user", "Hello")])
        self._costs = MeasuredCosts(self._session, self._greeting)

    def warm_up(self) -> None:
        """Compile the kernels of a round by generating a short answer alone, then two concurrently."""
        self._measure()
        for together in range(1, 1 + min(2, self._session.sequences)):
            jobs = [Job(self._greeting, 8, Sampling(), 0, (), lambda _: None) for _ in range(together)]
            running = [self._begin(job, counted=False) for job in jobs]
            while running:
                self._round(running)
                running = [each for each in running if not each.answer.reached]
            self._running.clear()

    def submit(self, job: Job) -> None:
        """Put a job into the queue.

        Raises:
            queue.Full: The queue is full.
            Gone: The worker has stopped or is stopping.
        """
        if self._stopping.is_set():
            raise Gone
        self.jobs.put_nowait(job)

    def stop(self) -> None:
        """Make `work` return after the current round."""
        self._stopping.set()

    def work(self) -> None:
        """Process jobs until `stop` or Ctrl-C; unfinished jobs then get `Gone`."""
        try:
            self._work()
        finally:
            self._stopping.set()
            self._session.close()
            for running in self._running:
                running.job.put(Gone())
            with suppress(queue.Empty):
                while True:
                    self.jobs.get_nowait().put(Gone())

    def answer(self, client: Callable[[], Result]) -> Result:
        """Run `client` in another thread while this thread processes its jobs; return the client's result."""
        self.warm_up()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(client)
            future.add_done_callback(lambda _: self.stop())
            self.work()
            return future.result()

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._admit()
                if self._running:
                    self._round(self._running)
                for running in [*self._running]:
                    if running.job.gone.is_set():
                        self._end(running, "gone", Gone())
                    elif running.answer.reached:
                        self._finish(running)
            except Exception as error:  # of any kind: later jobs must still be processed
                logger.exception("%s answers failed", len(self._running))
                for running in [*self._running]:
                    self._end(running, "error", error)

    def _admit(self) -> None:
        """Start waiting jobs while sequences are free; if no answer is running, wait briefly for a job."""
        while len(self._running) < self._session.sequences:
            try:
                job = self.jobs.get_nowait() if self._running else self.jobs.get(timeout=STOPS_WITHIN_S)
            except queue.Empty:
                return
            if job.gone.is_set():
                self.answers.labels("gone").inc()
                continue
            self._take_newer()
            try:
                self._begin(job)
            except Exception as error:  # of this prompt alone
                logger.exception("an answer failed")
                self.answers.labels("error").inc()
                job.put(error)

    def _take_newer(self) -> None:
        """Switch to a newer drafter if there is one; if it cannot be loaded, the current one stays."""
        try:
            if (folder := self._newer()) is None:
                return
            drafter = load_drafter(folder, self.target)
            pack_linears(drafter)
            self._decoder = compile_decoder(self.recipe, drafter.decoder(self.length))
        except Exception:  # of any kind: the server continues with the current drafter
            logger.exception("the newer drafter could not be loaded; the current one stays")
            return
        self.drafter = drafter
        for running in self._running:
            running.method = None
        self._measure()
        self.drafters.inc()
        logger.warning("serving with the drafter in %s from now on", folder)

    def _free(self) -> int:
        """Return the number of a free sequence of the session."""
        used = {running.number for running in self._running}
        return next(number for number in range(self._session.sequences) if number not in used)

    def _measure(self) -> None:
        """Measure this drafter's round costs, which adaptive trees need; overwrites a free sequence."""
        self._session.current = self._free()
        self._session.read_layers(self.drafter.feature_layers)
        self._costs.set_costs(build_tree_drafter(self.recipe.eval.methods[0], self._decoder, Sampling()))

    def _begin(self, job: Job, counted: bool = True) -> Running:
        """Prefill a prompt and start its answer."""
        began_s, session = time.perf_counter(), self._session
        session.current = self._free()
        session.read_layers(self.drafter.feature_layers)
        generator = torch.Generator(self.target.device).manual_seed(job.seed)
        stop = StopStrings(job.stops, self.tokenizer) if job.stops else None
        columns = self.drafter.vocab.columns
        answer = Answering(job.sampling, job.new_tokens, self.end_ids, generator, stop, columns=columns)
        step = session.prefill(job.prompt_ids)
        answer.begin(step.logits[-1])
        answer.record.first_token_s = answer.record.prefill_s = time.perf_counter() - began_s
        running = Running(
            job,
            session.current,
            answer,
            generator,
            Pieces(self.tokenizer, job.stops),
            self.drafter.feature_layers,
            [step.features],
            began_s,
            counted,
        )
        self._running.append(running)
        return running

    @torch.inference_mode()
    def _round(self, answers: Sequence[Running]) -> None:
        """Run one forward of the target: over one answer's draft tree, or over one token of each of several answers."""
        answers = [running for running in answers if not running.answer.reached]
        if not answers:
            return
        began_s, session = time.perf_counter(), self._session
        alone = answers[0] if len(answers) == 1 else None
        for running in answers:
            if running is not alone:
                running.method = None  # its drafter does not read this round's tokens
        method = None if alone is None else self._method_of(alone)
        trees = [running.answer.cut(method.propose()) if method else root_only(running.newest) for running in answers]
        steps = session.forward_trees([(each.number, tree) for each, tree in zip(answers, trees, strict=True)])
        for running, tree, step in zip(answers, trees, steps, strict=True):
            verdict = running.answer.choose(tree, step.logits)
            if isinstance(method, ReadsLogits):
                method.read_logits(tree, step.logits)
            session.commit_of(running.number, verdict.path)
            round_, committed, features = running.answer.take(tree, step, verdict)
            running.features.append(features.clone())
            if method is not None and not running.answer.reached:
                method.observe(committed, features)
            if running.counted:
                self._count(round_)
            running.answer.record.round_s.append(time.perf_counter() - began_s)
            running.say(running.pieces.of_round(round_))

    def _method_of(self, running: Running) -> TreeDrafter | None:
        """Return the method that drafts for an answer that runs alone.

        None if the answer started with a drafter of other feature layers.
        """
        if running.layers != self.drafter.feature_layers:
            return None
        if running.method is None:
            recipe, job = self.recipe.eval.methods[0], running.job
            method = build_tree_drafter(recipe, self._decoder, job.sampling, running.generator)
            self._costs.set_costs(method)  # already measured by `_measure`
            features = torch.cat(running.features)
            running.features = [features]
            method.start([*job.prompt_ids, *running.answer.record.ids[:-1]], features)
            method.observe([running.newest], features[-1:])
            running.method = method
        return running.method

    def _finish(self, running: Running) -> None:
        job, record = running.job, running.answer.record
        record.wall_time_s = time.perf_counter() - running.began_s
        ended = record.text is not None or record.ids[-1] in self.end_ids
        running.say(running.pieces.rest(record))
        finished = Finished(job.prompt_ids, record, "stop" if ended else "length", "".join(running.texts))
        self.generated.inc(len(record.ids))
        self.seconds.inc(record.wall_time_s)
        self._keep(finished)
        self._end(running, finished.reason, finished)

    def _keep(self, finished: Finished) -> None:
        """Call `on_answer`; if it fails, as on a full disk, the client still gets its answer."""
        if self.on_answer is None:
            return
        try:
            self.on_answer(finished)
        except Exception as error:
            self.not_kept.inc()
            if self._keeps:
                logger.warning("answers cannot be stored and are only sent to clients: %s", reason(error))
            self._keeps = False
        else:
            if not self._keeps:
                logger.warning("answers are stored again")
            self._keeps = True

    def _end(self, running: Running, reason: str, result: Finished | BaseException) -> None:
        self._running.remove(running)
        self.answers.labels(reason).inc()
        running.job.put(result)

    def _count(self, round_: Round) -> None:
        self.rounds.inc()
        self.drafted.inc(round_.tree.shape.draft_depth)
        self.accepted.inc(round_.accepted)
        for position in range(round_.accepted):
            self.by_position.labels(position).inc()


class Pieces:
    """Splits an answer's text into the pieces of its rounds.

    Text at the end is held back as long as it may be part of a stop string or of an incomplete character.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._growing: GrowingText | None = None
        self._sent = 0  # characters

    def of_round(self, round_: Round) -> Piece:
        if self._growing is None:
            self._growing = GrowingText(self._tokenizer)
            self._growing.add(round_.tree.tokens[0])  # the prefill's token
        texts = [self._growing.text, *map(self._growing.add, round_.committed)]
        drafted = texts[round_.accepted][len(texts[0]) :]
        return self._piece(texts[-1], drafted, round_.kept, round_.accepted)

    def rest(self, record: AnswerRecord) -> Piece:
        """Return the text that was held back, up to the stop string that ended the answer."""
        text = record.text
        if text is None:
            text = str(self._tokenizer.decode(record.ids, skip_special_tokens=True)).rstrip(UNFINISHED)
        return Piece(text[self._sent :])

    def _piece(self, text: str, drafted: str, tokens: int, accepted: int) -> Piece:
        held = max((_begun(text, stop) for stop in self._stops), default=0)
        new = text[self._sent : max(self._sent, len(text) - held)]
        self._sent += len(new)
        return Piece(new, drafted if new.startswith(drafted) else "", tokens, accepted)


def _begun(text: str, stop: str) -> int:
    """Return the number of characters at the text's end that may belong to a stop string.

    If the text holds the whole stop string, the number counts from its start.
    """
    if stop in text:
        return len(text) - text.index(stop)
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)


# ---- the API ----


def application(worker: Worker, api_key: str | None = None, names: Sequence[str] = ()) -> FastAPI:
    """Build the FastAPI application.

    Args:
        worker: Generates the answers; `work` must run in another thread than the server, best in the one that loaded
        it.
        api_key: Bearer token that clients must send; None: none.
        names: Further host names by which clients may reach it, see `Guard`.
    """
    app = FastAPI(title="draftsmith", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    name = worker.recipe.target.display_name
    # In one separate thread, so that tokenising a long text does not block the event loop, which sends the pieces.
    tokenising = ThreadPoolExecutor(1, "tokenising")

    app.add_middleware(Guard, names=names)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
        detail = first["msg"].removeprefix("Value error, ")
        return error(400, f"{where}: {'not supported here' if first['type'] == 'extra_forbidden' else detail}")

    @app.exception_handler(AnyHTTPException)  # starlette's too, for unknown paths and methods
    async def refused(_: Request, problem: AnyHTTPException) -> Response:
        return error(problem.status_code, str(problem.detail))

    @app.exception_handler(Exception)
    async def failed(_: Request, problem: Exception) -> Response:
        logger.error("a request failed", exc_info=problem)
        return error(500, "the request failed")

    def known(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
            raise HTTPException(401, "the API key is wrong or missing")

    def take(body: Asked, prompt_ids: list[int], max_tokens: int | None) -> tuple[Job, asyncio.Queue[Any]]:
        room = worker.length - len(prompt_ids)
        if room < 1:
            raise HTTPException(
                400, f"the prompt has {len(prompt_ids)} tokens; prompt and answer may have {worker.length} together"
            )
        loop, out = asyncio.get_running_loop(), asyncio.Queue[Any]()
        job = Job(
            prompt_ids,
            min(room, max_tokens or room),
            Sampling(body.temperature, 0, body.top_p),
            uuid.uuid4().int % 2**63 if body.seed is None else body.seed % 2**63,
            body.stops,
            lambda piece: loop.call_soon_threadsafe(out.put_nowait, piece),
            streamed=body.stream,
        )
        try:
            worker.submit(job)
        except queue.Full:
            raise HTTPException(429, f"the queue is full ({worker.jobs.maxsize} requests): try again later") from None
        except Gone:
            raise HTTPException(503, "the server is stopping") from None
        return job, out

    async def ids_by(tokenise: Callable[..., list[int]], prompt: Any, where: str) -> list[int]:
        running = asyncio.get_running_loop()
        try:
            return await running.run_in_executor(tokenising, tokenise, worker.tokenizer, prompt, worker.length)
        except TooLong as problem:
            raise HTTPException(400, str(problem)) from None
        except UserError as problem:
            raise HTTPException(400, f"{where}: {problem}") from None

    async def respond(
        request: Request, body: Asked, prompt_ids: list[int], max_tokens: int | None, chat: bool
    ) -> Response:
        job, out = take(body, prompt_ids, max_tokens)
        made = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }
        if body.stream:
            return StreamingResponse(streamed(job, out, made, body, chat), media_type="text/event-stream")
        try:
            end = await next_of(out, request)
        finally:
            job.gone.set()
        content = {"message": {"role": "assistant", "content": end.text}} if chat else {"text": end.text}
        return JSONResponse(
            made
            | {
                "object": "chat.completion" if chat else "text_completion",
                "choices": [{"index": 0, "finish_reason": end.reason, "logprobs": None, **content}],
                "usage": usage(end),
                "draftsmith": {
                    "rounds": end.record.rounds,
                    "accepted_tokens": end.record.accepted_drafts,
                    "tokens_per_round": end.record.accept_lengths,
                },
            }
        )

    async def streamed(
        job: Job, out: asyncio.Queue[Any], made: dict[str, Any], body: Asked, chat: bool
    ) -> AsyncIterator[str]:
        kind = {"object": "chat.completion.chunk" if chat else "text_completion"}

        def event(content: dict[str, Any], reason: str | None = None, **more: Any) -> str:
            choice = {"index": 0, "finish_reason": reason, "logprobs": None, **content}
            return f"data: {json.dumps({**made, **kind, 'choices': [choice], **more})}\n\n"

        def words(text: str) -> dict[str, Any]:
            return {"delta": {"content": text}} if chat else {"text": text}

        try:
            if chat:
                yield event({"delta": {"role": "assistant", "content": ""}})
            while not isinstance(end := await out.get(), Finished):
                if isinstance(end, BaseException):
                    yield f"data: {json.dumps({'error': {'message': 'the answer failed', 'type': 'server_error'}})}\n\n"
                    return
                own = {"tokens": end.tokens, "accepted_tokens": end.accepted, "drafted_text": end.drafted}
                if end.text or end.tokens:
                    yield event(words(end.text), draftsmith=own)
            yield event({"delta": {}} if chat else {"text": ""}, end.reason)
            if body.stream_options is not None and body.stream_options.include_usage:
                yield f"data: {json.dumps({**made, **kind, 'choices': [], 'usage': usage(end)})}\n\n"
            yield "data: [DONE]\n\n"
        finally:  # also when the client has disconnected
            job.gone.set()

    @app.post("/v1/chat/completions", dependencies=[Depends(known)])
    async def chat_completions(request: Request, body: ChatAsked) -> Response:
        turns = [message.turn for message in body.messages]
        if turns[-1].role != "user":
            raise HTTPException(400, f"messages: the last one has role {turns[-1].role}, it must be the user's")
        prompt_ids = await ids_by(ids_of_turns, turns, "messages")
        return await respond(request, body, prompt_ids, body.max_completion_tokens or body.max_tokens, chat=True)

    @app.post("/v1/completions", dependencies=[Depends(known)])
    async def completions(request: Request, body: CompletionAsked) -> Response:
        ids = body.prompt if isinstance(body.prompt, list) else await ids_by(ids_of_text, body.prompt, "prompt")
        vocabulary = worker.target.config.get_text_config().vocab_size
        if not ids or not all(0 <= token < vocabulary for token in ids):
            raise HTTPException(400, f"prompt: give token ids from 0 to {vocabulary - 1}, at least one")
        return await respond(request, body, ids, body.max_tokens or 16, chat=False)

    @app.get("/v1/models", dependencies=[Depends(known)])
    async def models() -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": 0, "owned_by": "draftsmith", "max_model_len": worker.length}
        return {"object": "list", "data": [card]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", dependencies=[Depends(known)])
    async def metrics() -> Response:
        return Response(generate_latest(worker.registry), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        return page_response(PAGE.read_text(encoding="utf-8"))

    return app


def usage(finished: Finished) -> dict[str, int]:
    """Return the token counts as OpenAI's API defines them, the end token included."""
    prompt, answer = len(finished.prompt_ids), len(finished.record.ids)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


async def next_of(out: asyncio.Queue[Any], request: Request) -> Any:
    """Wait for the next result of a job, and check meanwhile whether the client is still connected.

    Raises:
        HTTPException: The client has disconnected, or the answer failed.
    """
    while True:
        try:
            piece = await asyncio.wait_for(out.get(), timeout=0.5)
        except TimeoutError:
            if await request.is_disconnected():
                raise HTTPException(499, "the client has disconnected") from None
            continue
        if isinstance(piece, BaseException):
            raise HTTPException(500, "the answer failed")
        return piece


class Listening:
    """Serves the application on a port, in a separate thread.

    Raises:
        UserError: The port is in use, or the address does not belong to this machine.
    """

    def __init__(self, app: FastAPI, host: str, port: int, connections: int = MOST_CONNECTIONS) -> None:
        import uvicorn

        config = uvicorn.Config(
            app,
            http=TimedRequests,
            host=host,
            port=port,
            log_level="critical",
            limit_concurrency=connections,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            listening.close()
            raise UserError(
                f"cannot listen on {host}:{port} ({error.strerror}): give another --port or --host"
            ) from None
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="listening", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        """Shut down; open connections get a grace period."""
        self._server.should_exit = True
        self._thread.join(3 * LAST_WORDS_S)


def run(worker: Worker, host: str, port: int, api_key: str | None, names: Sequence[str] = ()) -> None:
    """Serve until Ctrl-C or SIGTERM, with the models in this thread, see `Worker`.

    Args:
        worker: Generates the answers.
        host: Address or name to listen on.
        port: Port to listen on.
        api_key, names: See `application`.

    Raises:
        UserError: The port is in use, or the address does not belong to this machine.
    """
    worker.warm_up()
    listening = Listening(application(worker, api_key, [host, *names]), host, port)
    try:
        worker.work()
    finally:
        listening.stop()
