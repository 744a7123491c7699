"""Generate the answers of `draftsmith serve`: one thread, one session, one request at a time.

Other requests wait in order; a streamed one is sent its place in the queue. (vLLM is for many users.) Greedy answers
equal the target's, and sampled answers have the target's distribution.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids
from draftsmith.errors import UserError, reason
from draftsmith.eval.bench.measured_methods import compile_decoder, load_models
from draftsmith.eval.decoding.generate import AnswerRecord, Round, generate
from draftsmith.eval.decoding.session import open_session
from draftsmith.eval.decoding.stop_strings import GrowingText, StopMatcher
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.kernels.cpu_kernels import pack_linears
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import session_tokens
from draftsmith.recipes.schema import Recipe

STOPS_WITHIN_S = 0.5  # how long an idle worker waits for a job before it checks for `stop`
WARM_UP_TOKENS = 8

logger = logging.getLogger(__name__)


@dataclass
class Waiting:
    """Place of a request in the queue, from 1 on: the number of answers that come before its own."""

    place: int


@dataclass
class Piece:
    """Text that a round added to an answer.

    drafted: the part of `text`, from its beginning, that comes from accepted draft tokens. tokens: number of all new
    tokens. accepted: number of accepted draft tokens among them.
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


@dataclass(eq=False)
class Job:
    """A queued or running request. The worker passes results to `send` and checks `cancelled` every round.

    send: called with every `Waiting` and `Piece`, then with the `CompletedAnswer` or an error. cancelled: set when the
    client has disconnected. streamed: if False, `send` gets the last result only, as each wakes the listening thread.
    """

    prompt_ids: list[int]
    new_tokens: int
    sampling: Sampling
    seed: int
    stops: Sequence[str]
    send: Callable[[Waiting | Piece | CompletedAnswer | BaseException], object]
    cancelled: threading.Event = field(default_factory=threading.Event)
    streamed: bool = True
    place: int = 0


class RequestCancelled(Exception):
    """Raised or sent when an answer is cancelled: its client has disconnected, or the server stops."""


class Worker:
    """Generates the answers of all jobs in the order of their arrival.

    Call `work` in the thread that loaded the models. OpenMP starts a team of threads for every thread that computes. If
    there are more threads than processors, waiting threads sleep instead of spinning, which costs two thirds of the
    speed (68 instead of 186 tokens/s with SmolLM2 on two cores).

    Args:
        recipe: Recipe whose first method drafts.
        queue_length: Number of requests that may wait.
        on_answer: Called with every complete answer.
        get_newer: Called before every answer; returns the folder of a drafter to serve from then on, or None.

    Raises:
        UserError: The target or the drafter cannot be loaded, or the method has a lenience below 1.
    """

    def __init__(
        self,
        recipe: Recipe,
        queue_length: int,
        on_answer: Callable[[CompletedAnswer], None] | None = None,
        get_newer: Callable[[], Path | None] = lambda: None,
    ) -> None:
        self.recipe, self.on_answer, self._get_newer = recipe, on_answer, get_newer
        if (method := recipe.eval.methods[0]).lenience < 1:
            raise UserError(
                f"eval.methods, {method.name}: with lenience {method.lenience:g} answers differ from the target's, "
                "but the server promises the target's answers: remove lenience"
            )
        self.target, self.tokenizer, drafters = load_models(recipe)
        ((_, drafter),) = drafters.items()
        self.length = session_tokens(self.target)
        self.end_ids = frozenset(answer_end_ids(self.target.generation_config, self.tokenizer))
        self.jobs: queue.Queue[Job] = queue.Queue(queue_length)
        self._stopping = threading.Event()
        self._current: Job | None = None
        self._session = open_session(self.target, self.length, recipe.eval.compile)
        self._set_drafter(drafter)

    def warm_up(self) -> None:
        """Compile the kernels of a round by generating a short answer."""
        greeting = prompt_token_ids(self.tokenizer, [Turn("user", "Hello")])
        new_tokens = min(WARM_UP_TOKENS, self.length - len(greeting))
        self._generate(Job(greeting, new_tokens, Sampling(), 0, (), lambda _: None), None)

    def submit(self, job: Job) -> None:
        """Add a job to the queue, after removing the waiting jobs whose clients have disconnected.

        Raises:
            queue.Full: The queue is full.
            RequestCancelled: The worker has stopped or is stopping.
        """
        with self.jobs.mutex:
            for waiting in [each for each in self.jobs.queue if each.cancelled.is_set()]:
                self.jobs.queue.remove(waiting)
        self.jobs.put_nowait(job)
        if self._stopping.is_set():  # looked at last, as `work` may have emptied the queue before
            raise RequestCancelled
        if self._current is not None:
            self._send_places()

    def stop(self) -> None:
        """Make `work` return after the current round."""
        self._stopping.set()

    def work(self) -> None:
        """Process jobs until `stop` or Ctrl-C; unfinished jobs then get `RequestCancelled`."""
        try:
            while not self._stopping.is_set():
                with suppress(queue.Empty):
                    self._current = self.jobs.get(timeout=STOPS_WITHIN_S)
                    self._send_places()
                    self._answer(self._current)
                self._current = None
        finally:
            self._stopping.set()
            self._session.close()
            if self._current is not None:
                self._current.send(RequestCancelled())
            with suppress(queue.Empty):
                while True:
                    self.jobs.get_nowait().send(RequestCancelled())

    def _send_places(self) -> None:
        """Send every waiting request its place, if that has changed."""
        with self.jobs.mutex:
            for place, job in enumerate(self.jobs.queue, start=1):
                if job.streamed and place != job.place:
                    job.place = place
                    job.send(Waiting(place))

    def _answer(self, job: Job) -> None:
        """Answer a request, and send it the answer, or the error that ended it."""
        if job.cancelled.is_set():
            return
        self._take_newer()
        stream = _Stream(job, GrowingText(self.tokenizer))
        try:
            record = self._generate(job, stream)
        except RequestCancelled as cancelled:
            job.send(cancelled)
            return
        except Exception as error:  # of any kind: later jobs must still be processed
            logger.exception("an answer failed")
            job.send(error)
            return
        ended = record.text is not None or record.ids[-1] in self.end_ids
        finished = CompletedAnswer(job.prompt_ids, record, "stop" if ended else "length", stream.end(record))
        self._store(finished)
        job.send(finished)

    def _generate(self, job: Job, stream: _Stream | None) -> AnswerRecord:
        """Generate an answer.

        Args:
            stream: Gets every round; None for a warm-up.

        Raises:
            RequestCancelled: The client has disconnected, or the worker stops.
        """
        generator = torch.Generator(self.target.device).manual_seed(job.seed)
        method = build_tree_drafter(self.recipe.eval.methods[0], self._decoder, job.sampling, generator)
        stop = StopMatcher(job.stops, self.tokenizer) if job.stops else None

        def on_round(round_: Round) -> None:
            if stream is not None:
                stream.add(round_)
            if job.cancelled.is_set() or self._stopping.is_set():
                raise RequestCancelled

        self._session.read_layers(self.drafter.feature_layers)
        how = (job.sampling, job.new_tokens, self.end_ids, generator, stop)
        return generate(self._session, method, job.prompt_ids, *how, on_round=on_round)

    def _take_newer(self) -> None:
        """Switch to a newer drafter if there is one; if it cannot be loaded, the current one stays."""
        try:
            if (folder := self._get_newer()) is None:
                return
            drafter = load_drafter(folder, self.target)
            pack_linears(drafter)
            self._set_drafter(drafter)
        except Exception:  # of any kind: the server continues with the current drafter
            logger.exception("the newer drafter could not be loaded; the current one stays")
            return
        logger.warning("serving with the drafter in %s from now on", folder)

    def _set_drafter(self, drafter: Drafter) -> None:
        """Draft with this drafter from the next answer on."""
        decoder = compile_decoder(drafter.decoder(self.length), self.target.device, self.recipe.eval.compile)
        self.drafter, self._decoder = drafter, decoder

    def _store(self, finished: CompletedAnswer) -> None:
        """Call `on_answer`; if it fails, as on a full disk, the client still gets its answer."""
        if self.on_answer is None:
            return
        try:
            self.on_answer(finished)
        except Exception as error:
            logger.warning("an answer cannot be stored and is only sent to its client: %s", reason(error))


@dataclass
class _Stream:
    """Text of one answer, sent round by round if its request is streamed. sent: the text of its rounds so far."""

    job: Job
    growing: GrowingText
    rounds: int = 0
    sent: str = ""

    def add(self, round_: Round) -> None:
        """Send the text of a round, but hold back an ending that could be the start of a stop string."""
        if not self.job.streamed:
            return
        if self.rounds == 0:
            self.growing.add(round_.tree.tokens[0])  # the prefill's token
        self.rounds += 1
        texts = [self.growing.text, *map(self.growing.add, round_.committed)]
        drafted = texts[round_.accepted][len(texts[0]) :]
        held = max((count_held_characters(texts[-1], stop) for stop in self.job.stops), default=0)
        self._send(texts[-1][: len(texts[-1]) - held], drafted, round_.kept, round_.accepted)

    def end(self, record: AnswerRecord) -> str:
        """Send the rest of the text, and return all of it."""
        if self.rounds == 0:
            self.growing.add(*record.ids)
        text = self.growing.text if record.text is None else record.text
        if self.job.streamed:
            self._send(text)
        return text

    def _send(self, text: str, drafted: str = "", tokens: int = 0, accepted: int = 0) -> None:
        """Send what the text has more than was sent; the others as in `Piece`."""
        new = text[len(self.sent) :]
        self.sent += new
        self.job.send(Piece(new, drafted if new.startswith(drafted) else "", tokens, accepted))


def count_held_characters(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of the stop string.

    If the text contains the whole stop string, all characters from its start are counted.
    """
    if stop in text:
        return len(text) - text.index(stop)
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)
