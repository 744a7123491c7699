"""Generate the answers of `draftsmith serve`: one thread, one session, several requests concurrently.

While one answer runs alone it is drafted and verified. Several answers share each forward of the target, with one token
per answer and without drafts: reading the weights once for all of them gains more than drafting, which would cost more
arithmetic and a drafter's forward per sequence. Greedy answers equal the target's, and sampled ones have its
distribution, with and without drafts.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge
from torch import Tensor

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids
from draftsmith.errors import UserError, reason
from draftsmith.eval.bench.costs import MeasuredCosts
from draftsmith.eval.bench.measured_methods import compile_decoder, load_models
from draftsmith.eval.decoding.generate import AnswerRecord, Generation, Round, decode_round
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import open_session
from draftsmith.eval.decoding.stop_strings import GrowingText, StopMatcher
from draftsmith.eval.methods.drafter import TreeDrafter, build_tree_drafter
from draftsmith.eval.trees.adaptive import AdaptiveTree
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.cpu_kernels import pack_linears
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import session_tokens
from draftsmith.recipes.schema import Recipe

MOST_SAMPLINGS = 64  # whose adaptive trees are remembered
STOPS_WITHIN_S = 0.5  # how long an idle worker waits for a job before it checks for `stop`

logger = logging.getLogger(__name__)


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
class CompletedAnswer:
    """A complete answer. reason: OpenAI's finish reason, `stop` or `length`."""

    prompt_ids: list[int]
    record: AnswerRecord
    reason: str
    text: str


@dataclass
class Job:
    """A queued or running request. The worker passes results to `send` and checks `cancelled` every round.

    send: gets the pieces, then the complete answer or an error. cancelled: set when the client has disconnected.
    streamed: False: `send` gets no pieces, each of which would wake the listening thread.
    """

    prompt_ids: list[int]
    new_tokens: int
    sampling: Sampling
    seed: int
    stops: Sequence[str]
    send: Callable[[Piece | CompletedAnswer | BaseException], object]
    cancelled: threading.Event = field(default_factory=threading.Event)
    streamed: bool = True


@dataclass
class Running:
    """An answer that is being generated.

    layers: feature layers of the drafter at its start; None after a drafter with others. features: of the committed
    tokens, from these layers, as tensors [n, F] in order. text: what was sent. counted: False for warm-up.
    """

    job: Job
    generation: Generation
    growing: GrowingText
    layers: tuple[int, ...] | None
    features: list[Tensor]
    started_s: float
    counted: bool
    text: str = ""

    def send_round(self, round_: Round) -> None:
        """Send the text of a round if the answer is streamed, but no end of it that may be part of a stop string."""
        if not self.job.streamed:
            return
        texts = [self.growing.text, *map(self.growing.add, round_.committed)]
        drafted = texts[round_.accepted][len(texts[0]) :]
        held = max((count_held_characters(texts[-1], stop) for stop in self.job.stops), default=0)
        self.send(texts[-1][: len(texts[-1]) - held], drafted, round_.kept, round_.accepted)

    def send(self, text: str, drafted: str = "", tokens: int = 0, accepted: int = 0) -> None:
        """Send what the answer's text has more than was sent, if the answer is streamed; the others as in `Piece`."""
        new = text[len(self.text) :]
        self.text += new
        if self.job.streamed:
            self.job.send(Piece(new, drafted if new.startswith(drafted) else "", tokens, accepted))


class RequestCancelled(Exception):
    """Raised or sent when an answer is cancelled: its client has disconnected, or the server stops."""


class Worker:
    """Generates the answers of all jobs, several concurrently, with one session.

    Run it in the thread that loaded the models: OpenMP starts a team of threads for every thread that computes, and
    with more threads than processors no thread spins while it waits, which costs two thirds of the speed (68 instead of
    186 tokens/s with SmolLM2 on two cores).

    Args:
        recipe: Recipe whose first method drafts.
        get_newer: Called before every answer; returns the folder of a drafter to serve from then on, or None.
        concurrency: Number of concurrent answers, each with its KV cache.

    Raises:
        UserError: The target or the drafter cannot be loaded, or the method has a lenience below 1.
    """

    def __init__(
        self,
        recipe: Recipe,
        queue_length: int,
        on_answer: Callable[[CompletedAnswer], None] | None = None,
        get_newer: Callable[[], Path | None] = lambda: None,
        concurrency: int = 1,
    ) -> None:
        self.recipe, self.on_answer, self._get_newer = recipe, on_answer, get_newer
        if (method := recipe.eval.methods[0]).lenience < 1:
            raise UserError(
                f"eval.methods, {method.name}: with lenience {method.lenience:g} answers would not be the target's, "
                "which a server promises: leave lenience out"
            )
        self.target, self.tokenizer, drafters = load_models(recipe)
        ((_, drafter),) = drafters.items()
        self.length = session_tokens(self.target)
        self.end_ids = frozenset(answer_end_ids(self.target.generation_config, self.tokenizer))
        self.jobs: queue.Queue[Job] = queue.Queue(queue_length)
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
        self._session = open_session(self.target, self.length, recipe.eval.compile, concurrency)
        self._greeting = prompt_token_ids(self.tokenizer, [Turn("user", "Hello")])
        self._costs = MeasuredCosts(self._session, self._greeting)
        self._set_drafter(drafter)

    def warm_up(self) -> None:
        """Compile the kernels of a round by generating a short answer alone, then two concurrently."""
        for together in range(1, 1 + min(2, self._session.sequences)):
            jobs = [Job(self._greeting, 8, Sampling(), 0, (), lambda _: None) for _ in range(together)]
            running = [self._start_answer(job, counted=False) for job in jobs]
            while running:
                self._round(running)
                running = [each for each in running if not each.generation.finished]
            self._running.clear()

    def submit(self, job: Job) -> None:
        """Put a job into the queue.

        Raises:
            queue.Full: The queue is full.
            RequestCancelled: The worker has stopped or is stopping.
        """
        if self._stopping.is_set():
            raise RequestCancelled
        self.jobs.put_nowait(job)

    def stop(self) -> None:
        """Make `work` return after the current round."""
        self._stopping.set()

    def work(self) -> None:
        """Process jobs until `stop` or Ctrl-C; unfinished jobs then get `RequestCancelled`."""
        try:
            self._work()
        finally:
            self._stopping.set()
            self._session.close()
            for running in self._running:
                running.job.send(RequestCancelled())
            with suppress(queue.Empty):
                while True:
                    self.jobs.get_nowait().send(RequestCancelled())

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._admit()
                if self._running:
                    self._round(self._running)
                for running in [*self._running]:
                    if running.job.cancelled.is_set():
                        self._end(running, "gone", RequestCancelled())
                    elif running.generation.finished:
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
            if job.cancelled.is_set():
                self.answers.labels("gone").inc()
                continue
            self._take_newer()
            try:
                self._start_answer(job)
            except Exception as error:  # of this prompt alone
                logger.exception("an answer failed")
                self.answers.labels("error").inc()
                job.send(error)

    def _take_newer(self) -> None:
        """Switch to a newer drafter if there is one; if it cannot be loaded or measured, the current one stays."""
        try:
            if (folder := self._get_newer()) is None:
                return
            drafter = load_drafter(folder, self.target)
            pack_linears(drafter)
            self._set_drafter(drafter)
        except Exception:  # of any kind: the server continues with the current drafter
            logger.exception("the newer drafter could not be loaded; the current one stays")
            return
        self.drafters.inc()
        logger.warning("serving with the drafter in %s from now on", folder)

    def _set_drafter(self, drafter: Drafter) -> None:
        """Draft with this drafter, after a measurement of its costs if trees are adaptive, in a free sequence."""
        decoder = compile_decoder(drafter.decoder(self.length), self.target.device, self.recipe.eval.compile)
        self._session.current = self._get_free_sequence()
        self._session.read_layers(drafter.feature_layers)
        method = build_tree_drafter(self.recipe.eval.methods[0], decoder, Sampling())
        self._costs.set_costs(method)
        costs = None if method.adaptive is None else method.adaptive.costs
        self.drafter, self._decoder = drafter, decoder
        # Adaptive trees learn from answer to answer; of few samplings, as each request may have its own.
        self._adaptive_of = lru_cache(MOST_SAMPLINGS)(lambda _: AdaptiveTree(costs))

    def _get_free_sequence(self) -> int:
        """Return the number of a free sequence of the session."""
        used = {running.generation.sequence for running in self._running}
        return next(number for number in range(self._session.sequences) if number not in used)

    def _start_answer(self, job: Job, counted: bool = True) -> Running:
        """Prefill a prompt and start its answer."""
        started_s, session = time.perf_counter(), self._session
        session.current = self._get_free_sequence()
        session.read_layers(self.drafter.feature_layers)
        generator = torch.Generator(self.target.device).manual_seed(job.seed)
        stop = StopMatcher(job.stops, self.tokenizer) if job.stops else None
        generation = Generation(Autoregressive(), job.sampling, job.new_tokens, self.end_ids, generator, stop)
        features = generation.begin(session, job.prompt_ids)
        growing = GrowingText(self.tokenizer)
        growing.add(generation.record.ids[0])
        running = Running(job, generation, growing, self.drafter.feature_layers, [features], started_s, counted)
        self._running.append(running)
        return running

    @torch.inference_mode()
    def _round(self, answers: Sequence[Running]) -> None:
        """Run a round: of one answer's draft tree, or of one token of each of several answers."""
        answers = [running for running in answers if not running.generation.finished]
        if not answers:
            return
        for running in answers:
            self._set_method(running, is_alone=len(answers) == 1)
        rounds = decode_round(self._session, [running.generation for running in answers])
        for running, round_ in zip(answers, rounds, strict=True):
            running.features.append(round_.features.clone())
            if running.counted:
                self._count(round_)
            running.send_round(round_)

    def _set_method(self, running: Running, is_alone: bool) -> None:
        """Set the next round's method: the drafter if the answer runs alone and started with its feature layers."""
        generation, method = running.generation, running.generation.method
        if running.layers != self.drafter.feature_layers:
            running.layers = None  # for good: some features may be of the other layers
        decoder = self._decoder if is_alone and running.layers else None
        if decoder is (method.decoder if isinstance(method, TreeDrafter) else None):
            return
        features = torch.cat(running.features)
        running.features = [features]
        if decoder is None:
            method = Autoregressive()
        else:
            recipe = self.recipe.eval.methods[0]
            adaptive = self._adaptive_of(generation.sampling)
            method = build_tree_drafter(recipe, decoder, generation.sampling, generation.generator, adaptive)
        *ids, newest = *running.job.prompt_ids, *generation.record.ids  # the newest is not in the KV cache yet
        method.start(ids, features)
        method.observe([newest], features[-1:])
        generation.method = method

    def _finish(self, running: Running) -> None:
        job, record = running.job, running.generation.record
        record.wall_time_s = time.perf_counter() - running.started_s
        ended = record.text is not None or record.ids[-1] in self.end_ids
        if not job.streamed and record.text is None:  # rounds decode streamed answers only
            running.growing.add(*record.ids[1:])
        running.send(running.growing.text if record.text is None else record.text)
        finished = CompletedAnswer(job.prompt_ids, record, "stop" if ended else "length", running.text)
        self.generated.inc(len(record.ids))
        self.seconds.inc(record.wall_time_s)
        self._store(finished)
        self._end(running, finished.reason, finished)

    def _store(self, finished: CompletedAnswer) -> None:
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

    def _end(self, running: Running, reason: str, result: CompletedAnswer | BaseException) -> None:
        """Stop an answer, count its reason in the metrics and send the result or error to its request."""
        self._running.remove(running)
        self.answers.labels(reason).inc()
        running.job.send(result)

    def _count(self, round_: Round) -> None:
        self.rounds.inc()
        self.drafted.inc(round_.tree.shape.draft_depth)
        self.accepted.inc(round_.accepted)
        for position in range(round_.accepted):
            self.by_position.labels(position).inc()


def count_held_characters(text: str, stop: str) -> int:
    """Return the number of characters at the text's end that may belong to a stop string.

    If the text holds the whole stop string, the number counts from its start.
    """
    if stop in text:
        return len(text) - text.index(stop)
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)
