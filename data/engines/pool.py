"""Several copies of an engine behind one, each in a process of its own: data parallelism within a machine.

Processes are spawned, so CUDA and the forked state of libraries never meet. A request goes to the worker that answered
its conversation before (its prefix is in that worker's KV cache) unless that one has clearly more to do than another.
A worker that dies takes its requests with it, so the pool ends with one sentence; what was finished was handed over.
"""

import contextlib
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from draftsmith.data.engines.affinity import Affinity
from draftsmith.data.engines.engine import Engine, Outcome, Request
from draftsmith.recipes.errors import UserError

CLOSE_TIMEOUT_S = 10.0


class EnginePool:
    """An `Engine` made of several.

    Args:
        make: Makes one engine; it and what it holds must be picklable.
        environments: One worker for each; set in the worker's environment before `make` is called.

    Raises:
        UserError: A worker could not make its engine.
    """

    def __init__(self, make: Callable[[], Engine], environments: Sequence[Mapping[str, str]]) -> None:
        self._workers = [_Worker(number, make, dict(environment)) for number, environment in enumerate(environments, 1)]
        try:
            ready = [worker.first_message() for worker in self._workers]
        except BaseException:
            self.close()
            raise
        self.concurrency = sum(concurrency for concurrency, _ in ready)
        bounds = [bound for _, bound in ready if bound is not None]
        self.max_length_tokens: int | None = min(bounds, default=None)
        self._affinity: Affinity[_Worker] = Affinity(self.concurrency)

    def submit(self, request: Request) -> None:
        least = min(self._workers, key=lambda worker: worker.in_flight)
        last = self._affinity.get(request.key)
        # An eighth more than the least busy one: a long common prefix saves more than an even load does.
        worker = last if last is not None and 8 * last.in_flight <= 9 * least.in_flight + 8 else least
        self._affinity.put(request.key, worker)
        worker.submit(request)

    def collect(self) -> list[tuple[str, Outcome]]:
        by_connection = {worker.connection: worker for worker in self._workers if worker.in_flight}
        assert by_connection, "nothing was submitted"
        # A pipe is readable too when its other end has died.
        ready = set(wait(list(by_connection)))
        workers = [worker for connection, worker in by_connection.items() if connection in ready]
        return [outcome for worker in workers for outcome in worker.outcomes()]

    def close(self) -> None:
        """Ask every worker to close its engine; those that do not are killed."""
        for worker in self._workers:
            worker.ask_to_close()
        for worker in self._workers:
            worker.join()


class _Worker:
    """This side of one process."""

    def __init__(self, number: int, make: Callable[[], Engine], environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.number = number
        self.in_flight = 0
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_run_worker, args=(theirs, make, environment), name=f"engine-{number}")
        self._process.start()
        theirs.close()  # so that reading ends when the worker does

    def first_message(self) -> tuple[int, int | None]:
        """Concurrency and longest length, once the engine is made."""
        return self._receive()

    def submit(self, request: Request) -> None:
        self.in_flight += 1
        try:
            self.connection.send(request)
        except OSError:
            self._raise_death()

    def outcomes(self) -> list[tuple[str, Outcome]]:
        outcomes: list[tuple[str, Outcome]] = self._receive()
        self.in_flight -= len(outcomes)
        return outcomes

    def ask_to_close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)

    def join(self) -> None:
        self._process.join(CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.connection.close()

    def _receive(self) -> Any:
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self._raise_death()
        if isinstance(message, UserError):
            raise message
        return message

    def _raise_death(self) -> None:
        self._process.join(CLOSE_TIMEOUT_S)
        code = self._process.exitcode
        ending = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        raise UserError(
            f"engine worker {self.number} {ending}: its own message is above; run the same command again to continue"
        ) from None


def _run_worker(connection: Connection, make: Callable[[], Engine], environment: dict[str, str]) -> None:
    """The worker: requests in, outcomes out, until the parent says None or is gone."""
    os.environ.update(environment)
    try:
        engine = make()
        try:
            connection.send((engine.concurrency, engine.max_length_tokens))
            _serve(connection, engine)
        finally:
            engine.close()
    except UserError as error:
        connection.send(error)
    except (BrokenPipeError, KeyboardInterrupt):
        return


def _serve(connection: Connection, engine: Engine) -> None:
    # Read by a thread: with both ends sending more than a pipe holds, each would wait for the other.
    waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(connection, waiting), daemon=True).start()
    in_flight = 0
    while True:
        while not in_flight or not waiting.empty():
            request = waiting.get()
            if request is None:
                return
            engine.submit(request)
            in_flight += 1
        outcomes = engine.collect()
        in_flight -= len(outcomes)
        connection.send(outcomes)


def _read_requests(connection: Connection, waiting: "queue.SimpleQueue[Request | None]") -> None:
    with contextlib.suppress(EOFError, OSError):
        while (request := connection.recv()) is not None:
            waiting.put(request)
    waiting.put(None)
