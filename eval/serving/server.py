"""`draftsmith serve`: OpenAI's API over our own decoding loop, for ParallelSpec's masks and draft trees.

An answer that is alone is drafted and verified. Several share the target's forwards, a token each: reading the weights
once for all of them brings more than drafts would, whose rows cost arithmetic, and each sequence its own drafter's
forwards. Requests beyond that wait in a queue of bounded length, behind which there is 429; who has gone away is not
answered. Greedy answers are the target's own, sampled ones have its distribution, alone or not.

What is not of OpenAI's API: each streamed piece, and a whole answer, has a field `draftsmith` with how many tokens of a
round were accepted drafts, and which text they are. What the loop cannot do is refused with 400, never ignored.
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
from draftsmith.eval.bench.costs import MeasuredCosts
from draftsmith.eval.bench.measured_methods import compile_decoder, load_models
from draftsmith.eval.decoding.loop import Answering, AnswerRecord, Round
from draftsmith.eval.decoding.method import ReadsLogits
from draftsmith.eval.decoding.shared_session import SharedSession
from draftsmith.eval.decoding.stop_strings import UNFINISHED, GrowingText, StopStrings
from draftsmith.eval.methods.drafter import DrafterMethod, drafter_method
from draftsmith.eval.serving.protection import Guard, TimedRequests, error, page_response
from draftsmith.eval.serving.requests import Asked, ChatAsked, CompletionAsked, TooLong, ids_of_text, ids_of_turns
from draftsmith.eval.trees.verify import Sampling, root_only
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.cpu_kernels import pack_linears
from draftsmith.models.target.loading import session_tokens
from draftsmith.recipes.errors import UserError, reason
from draftsmith.recipes.schema import Recipe

PAGE = Path(__file__).with_name("page.html")
LONGEST_TOKENS = 4096  # of a prompt and its answer, unless the target holds fewer
MOST_CONNECTIONS = 256
STOPS_WITHIN_S = 0.5  # of no work
LAST_WORDS_S = 2  # for connections, when the server ends

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


# ---- what is answered ----


@dataclass
class Piece:
    """What a round added: its text, of which the first `drafted` is that of accepted drafts; tokens likewise."""

    text: str
    drafted: str = ""
    tokens: int = 0
    accepted: int = 0


@dataclass
class Finished:
    """A whole answer, for whoever learns from what is served."""

    prompt_ids: list[int]
    record: AnswerRecord
    reason: str
    text: str


@dataclass
class Job:
    """One request on its way. The worker puts what it has come to, and looks at `gone` in each round.

    streamed: Whether pieces are put before, each of which wakes the thread that listens.
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
    """An answer under way.

    Args:
        number: Of its sequence in the session.
        features: [n, F] of the committed tokens, one after the other, of the drafter's layers when it began.
        method: Drafts while the answer is alone, and has then seen all of it.
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
    method: DrafterMethod | None = None
    texts: list[str] = field(default_factory=list)

    def say(self, piece: Piece) -> None:
        """Add a piece to the answer's text."""
        self.texts.append(piece.text)
        if self.job.streamed:
            self.job.put(piece)

    @property
    def newest(self) -> int:
        """The newest token, which is not in the session yet."""
        return self.answer.record.ids[-1]


class Gone(Exception):
    """Nobody waits for this answer, or the server ends."""


class Worker:
    """Answers jobs, several at once, with one session.

    To be run in the thread that loaded the models: OpenMP makes every thread that computes a team of its own, and where
    there are more threads in teams than processors none of them spins while it waits, which costs a step two thirds of
    its speed (186 and 68 tokens/s with SmolLM2 on two cores).

    Args:
        recipe: Its first method drafts.
        waiting: Jobs that may wait.
        on_answer: Told of every whole answer.
        newer: Asked before every answer for the folder of another drafter that is to serve from then on.
        at_once: Answers under way, each with its place in the cache.

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
        self.by_position = Counter("accepted_tokens_per_pos", "Likewise, by position", ["position"], **named)
        self.generated = Counter("generation_tokens", "Tokens of all answers", **named)
        self.answers = Counter("answers", "Answers by how they ended", ["reason"], **named)
        self.seconds = Counter("generation_seconds", "Seconds from a request's turn to its last token", **named)
        self.drafters = Counter("drafters_taken", "Drafters that came to serve after the first", **named)
        self.not_kept = Counter("answers_not_kept", "Answers that could not be written to learn from", **named)
        self._keeps = True
        Gauge("queue_requests", "Requests that wait", **named).set_function(self.jobs.qsize)
        Gauge("running_requests", "Answers under way", **named).set_function(lambda: len(self._running))
        self._session = SharedSession(self.target, self.length, at_once, recipe.eval.compile)
        self._decoder = compile_decoder(recipe, self.drafter.decoder(self.length))
        self._greeting = prompt_token_ids(self.tokenizer, [Turn("user", "Hello")])
        self._costs = MeasuredCosts(self._session, self._greeting)

    def warm_up(self) -> None:
        """Compile what a round runs, by a short answer alone and by one beside others."""
        self._measure()
        for together in range(1, 1 + min(2, self._session.sequences)):
            jobs = [Job(self._greeting, 8, Sampling(), 0, (), lambda _: None) for _ in range(together)]
            running = [self._begin(job, counted=False) for job in jobs]
            while running:
                self._round(running)
                running = [each for each in running if not each.answer.reached]
            self._running.clear()

    def submit(self, job: Job) -> None:
        """
        Raises:
            queue.Full: So many wait already.
            Gone: The worker ends.
        """
        if self._stopping.is_set():
            raise Gone
        self.jobs.put_nowait(job)

    def stop(self) -> None:
        """Let `work` end after the round that is under way."""
        self._stopping.set()

    def work(self) -> None:
        """Answer until `stop`, or Ctrl-C; whoever waits then is told that its answer failed."""
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
        """What a client of these jobs comes to, which is called in a thread of its own while this one answers."""
        self.warm_up()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client)
            asked.add_done_callback(lambda _: self.stop())
            self.work()
            return asked.result()

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
            except Exception as error:  # of any kind: the next jobs must be answered
                logger.exception("%s answers failed", len(self._running))
                for running in [*self._running]:
                    self._end(running, "error", error)

    def _admit(self) -> None:
        """Begin what waits, as far as there is a place; wait a little for a job where none is under way."""
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
        """Let another drafter serve, if there is one; what goes wrong with it leaves the one that serves."""
        try:
            if (folder := self._newer()) is None:
                return
            drafter = load_drafter(folder, self.target)
            pack_linears(drafter)
            self._decoder = compile_decoder(self.recipe, drafter.decoder(self.length))
        except Exception:  # of any kind: answers go on
            logger.exception("a newer drafter could not be taken")
            return
        self.drafter = drafter
        for running in self._running:
            running.method = None
        self._measure()
        self.drafters.inc()
        logger.warning("%s drafts from now on", folder)

    def _free(self) -> int:
        """A sequence of the session that no answer has."""
        taken = {running.number for running in self._running}
        return next(number for number in range(self._session.sequences) if number not in taken)

    def _measure(self) -> None:
        """What a round costs with this drafter, for trees that are cut by it; overwrites a sequence that is free."""
        self._session.current = self._free()
        self._session.read_layers(self.drafter.feature_layers)
        self._costs.give(drafter_method(self.recipe.eval.methods[0], self._decoder, Sampling()))

    def _begin(self, job: Job, counted: bool = True) -> Running:
        """Read a prompt."""
        began_s, session = time.perf_counter(), self._session
        session.current = self._free()
        session.read_layers(self.drafter.feature_layers)
        generator = torch.Generator(self.target.device).manual_seed(job.seed)
        stop = StopStrings(job.stops, self.tokenizer) if job.stops else None
        columns = self.drafter.columns
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
    def _round(self, under_way: Sequence[Running]) -> None:
        """One forward of the target: over a draft tree, or over a token of each of several."""
        under_way = [running for running in under_way if not running.answer.reached]
        if not under_way:
            return
        began_s, session = time.perf_counter(), self._session
        alone = under_way[0] if len(under_way) == 1 else None
        for running in under_way:
            if running is not alone:
                running.method = None  # it does not see what comes now
        method = None if alone is None else self._method_of(alone)
        trees = [running.answer.cut(method.propose()) if method else root_only(running.newest) for running in under_way]
        steps = session.forward_trees([(each.number, tree) for each, tree in zip(under_way, trees, strict=True)])
        for running, tree, step in zip(under_way, trees, steps, strict=True):
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

    def _method_of(self, running: Running) -> DrafterMethod | None:
        """What drafts for an answer that is alone; None if it began with a drafter of other layers."""
        if running.layers != self.drafter.feature_layers:
            return None
        if running.method is None:
            recipe, job = self.recipe.eval.methods[0], running.job
            method = drafter_method(recipe, self._decoder, job.sampling, running.generator)
            self._costs.give(method)  # measured before
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
        """Tell `on_answer`; what fails there, a full disk, costs no client its answer."""
        if self.on_answer is None:
            return
        try:
            self.on_answer(finished)
        except Exception as error:
            self.not_kept.inc()
            if self._keeps:
                logger.warning("answers are given, but not kept: %s", reason(error))
            self._keeps = False
        else:
            if not self._keeps:
                logger.warning("answers are kept again")
            self._keeps = True

    def _end(self, running: Running, reason: str, said: Finished | BaseException) -> None:
        self._running.remove(running)
        self.answers.labels(reason).inc()
        running.job.put(said)

    def _count(self, round_: Round) -> None:
        self.rounds.inc()
        self.drafted.inc(round_.tree.shape.draft_depth)
        self.accepted.inc(round_.accepted)
        for position in range(round_.accepted):
            self.by_position.labels(position).inc()


class Pieces:
    """The text of an answer, round by round, held back where it may belong to a stop string or to a character."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._growing: GrowingText | None = None
        self._sent = 0  # characters

    def of_round(self, round_: Round) -> Piece:
        if self._growing is None:
            self._growing = GrowingText(self._tokenizer)
            self._growing.add(round_.tree.tokens[0])  # came with the prompt
        texts = [self._growing.text, *map(self._growing.add, round_.committed)]
        drafted = texts[round_.accepted][len(texts[0]) :]
        return self._piece(texts[-1], drafted, round_.kept, round_.accepted)

    def rest(self, record: AnswerRecord) -> Piece:
        """What was held back, up to the stop string that ended the answer."""
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
    """The characters at the text's end that may belong to a stop string, all of it if it is complete."""
    if stop in text:
        return len(text) - text.index(stop)
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)


# ---- the API ----


def application(worker: Worker, api_key: str | None = None, names: Sequence[str] = ()) -> FastAPI:
    """Make the application.

    Args:
        worker: Answers, in a thread of its own or, better, in that which loaded it.
        api_key: What a client must give as its bearer; None: nothing.
        names: By which it may be reached, beside its addresses and `localhost`.
    """

    app = FastAPI(title="draftsmith", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    name = worker.recipe.target.shown
    # One text at a time, so that no long one keeps the others' pieces waiting: the event loop sends them.
    tokenising = ThreadPoolExecutor(1, "tokenising")

    app.add_middleware(Guard, names=names)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
        said = first["msg"].removeprefix("Value error, ")
        return error(400, f"{where}: {'not supported here' if first['type'] == 'extra_forbidden' else said}")

    @app.exception_handler(AnyHTTPException)  # starlette's too: of paths and methods that there are not
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
            raise HTTPException(401, "the key is wrong, or missing")

    def take(asked: Asked, prompt_ids: list[int], wanted: int | None) -> tuple[Job, asyncio.Queue[Any]]:
        room = worker.length - len(prompt_ids)
        if room < 1:
            raise HTTPException(400, f"the prompt has {len(prompt_ids)} tokens, of {worker.length} with its answer")
        loop, out = asyncio.get_running_loop(), asyncio.Queue[Any]()
        job = Job(
            prompt_ids,
            min(room, wanted or room),
            Sampling(asked.temperature, 0, asked.top_p),
            uuid.uuid4().int % 2**63 if asked.seed is None else asked.seed % 2**63,
            asked.stops,
            lambda piece: loop.call_soon_threadsafe(out.put_nowait, piece),
            streamed=asked.stream,
        )
        try:
            worker.submit(job)
        except queue.Full:
            raise HTTPException(429, f"{worker.jobs.maxsize} requests wait already") from None
        except Gone:
            raise HTTPException(503, "the server ends") from None
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
        request: Request, asked: Asked, prompt_ids: list[int], wanted: int | None, chat: bool
    ) -> Response:
        job, out = take(asked, prompt_ids, wanted)
        made = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }
        if asked.stream:
            return StreamingResponse(streamed(job, out, made, asked, chat), media_type="text/event-stream")
        try:
            end = await next_of(out, request)
        finally:
            job.gone.set()
        said = {"message": {"role": "assistant", "content": end.text}} if chat else {"text": end.text}
        return JSONResponse(
            made
            | {
                "object": "chat.completion" if chat else "text_completion",
                "choices": [{"index": 0, "finish_reason": end.reason, "logprobs": None, **said}],
                "usage": usage(end),
                "draftsmith": {
                    "rounds": end.record.rounds,
                    "accepted_tokens": end.record.accepted_drafts,
                    "tokens_per_round": end.record.accept_lengths,
                },
            }
        )

    async def streamed(
        job: Job, out: asyncio.Queue[Any], made: dict[str, Any], asked: Asked, chat: bool
    ) -> AsyncIterator[str]:
        kind = {"object": "chat.completion.chunk" if chat else "text_completion"}

        def event(said: dict[str, Any], reason: str | None = None, **more: Any) -> str:
            choice = {"index": 0, "finish_reason": reason, "logprobs": None, **said}
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
            if asked.stream_options is not None and asked.stream_options.include_usage:
                yield f"data: {json.dumps({**made, **kind, 'choices': [], 'usage': usage(end)})}\n\n"
            yield "data: [DONE]\n\n"
        finally:  # also when the client has gone
            job.gone.set()

    @app.post("/v1/chat/completions", dependencies=[Depends(known)])
    async def chat_completions(request: Request, asked: ChatAsked) -> Response:
        turns = [message.turn for message in asked.messages]
        if turns[-1].role != "user":
            raise HTTPException(400, "messages: the last one must be the user's")
        prompt_ids = await ids_by(ids_of_turns, turns, "messages")
        return await respond(request, asked, prompt_ids, asked.max_completion_tokens or asked.max_tokens, chat=True)

    @app.post("/v1/completions", dependencies=[Depends(known)])
    async def completions(request: Request, asked: CompletionAsked) -> Response:
        ids = asked.prompt if isinstance(asked.prompt, list) else await ids_by(ids_of_text, asked.prompt, "prompt")
        vocabulary = worker.target.config.get_text_config().vocab_size
        if not ids or not all(0 <= token < vocabulary for token in ids):
            raise HTTPException(400, f"prompt: token ids are from 0 to {vocabulary - 1}")
        return await respond(request, asked, ids, asked.max_tokens or 16, chat=False)

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
    """Count as OpenAI does, the end token included."""
    prompt, answer = len(finished.prompt_ids), len(finished.record.ids)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


async def next_of(out: asyncio.Queue[Any], request: Request) -> Any:
    """The next piece; the client may go away meanwhile.

    Raises:
        HTTPException: It has, or the answer failed.
    """
    while True:
        try:
            piece = await asyncio.wait_for(out.get(), timeout=0.5)
        except TimeoutError:
            if await request.is_disconnected():
                raise HTTPException(499, "the client has gone") from None
            continue
        if isinstance(piece, BaseException):
            raise HTTPException(500, "the answer failed")
        return piece


class Listening:
    """The application behind a port, in a thread of its own.

    Raises:
        UserError: The port is taken, or the address is none of this machine's.
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
                f"{host}:{port} cannot be listened on ({error.strerror}): give another --port, or --host"
            ) from None
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="listening", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        """Whoever still sends or reads is waited for a little."""
        self._server.should_exit = True
        self._thread.join(3 * LAST_WORDS_S)


def run(worker: Worker, host: str, port: int, api_key: str | None, names: Sequence[str] = ()) -> None:
    """Serve until Ctrl-C or SIGTERM: the models in this thread, see `Worker`.

    Args:
        worker: Answers.
        host: The address, or the name, that is listened on.
        port: Of it.
        api_key, names: As for `application`.

    Raises:
        UserError: As `Listening`.
    """
    worker.warm_up()
    listening = Listening(application(worker, api_key, [host, *names]), host, port)
    try:
        worker.work()
    finally:
        listening.stop()
