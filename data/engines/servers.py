"""Several servers behind one queue: where a request goes, and what becomes of a server that fails.

- *Throttled* (HTTP 429): it rests for as long as it asks and takes half as many requests at once, then more again with
  every answer (additive increase, multiplicative decrease; requests of one burst count once).
- *Out*: it cannot be reached, or several answers in a row were bad. It is checked again after growing pauses, its
  requests go to the others, and it starts again with one request at a time.
- *All out*: everybody waits. Only an answer stops the clock that ends in `give_up_after_s`, so servers that come and go
  without ever answering do not keep a run alive for ever.

Time is `time.monotonic` throughout. Everything here runs in the event loop's thread.
"""

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable

import anyio
from tqdm import tqdm

from draftsmith.data.engines.affinity import Affinity
from draftsmith.data.engines.openai_protocol import BadAnswer
from draftsmith.recipes.errors import UserError

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0
BAD_ANSWERS_IN_A_ROW = 3


class Throttled(Exception):
    """HTTP 429. `retry_after_s`: how long the server wants to be left alone, if it says."""

    def __init__(self, retry_after_s: float | None) -> None:
        super().__init__("HTTP 429")
        self.retry_after_s = retry_after_s


class Unreachable(Exception):
    """Nobody is there. `was_sent`: the request had been sent, and may be what the server fell over."""

    def __init__(self, reason: str, was_sent: bool = False) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


Check = Callable[[str], Awaitable[None]]


class Server:
    """One base URL.

    limit: requests at once, from 1 to `concurrency`; below `threshold` it doubles with every round of answers.
    resting_until: of the monotonic clock.
    problem: what went wrong last.
    """

    def __init__(self, url: str, concurrency: int) -> None:
        self.url = url
        self.concurrency = concurrency
        self.limit = self.threshold = float(concurrency)
        self.in_flight = 0
        self.is_out = False
        self.resting_until = self.throttled_at = -float("inf")
        self.bad_answers = self.failures = 0
        self.problem = ""

    def takes_more(self) -> bool:
        return not self.is_out and time.monotonic() >= self.resting_until and self.in_flight < int(self.limit)

    def is_busy(self) -> bool:
        """Answers may still come without anything being asked."""
        return not self.is_out and (self.in_flight > 0 or time.monotonic() >= self.resting_until)

    def has_answered(self) -> None:
        self.limit = min(self.concurrency, self.limit + (1 if self.limit < self.threshold else 1 / self.limit))
        self.bad_answers = self.failures = 0

    def throttle(self, retry_after_s: float | None, sent_at: float) -> None:
        """Rest. A request sent before the last throttling says nothing new about the limit."""
        now = time.monotonic()
        self.problem = "HTTP 429"
        if sent_at >= self.throttled_at:
            self.threshold = self.limit = max(1.0, self.limit / 2)
            self.throttled_at = now
            self.failures += 1
        rest_s = backoff_s(self.failures) if retry_after_s is None else retry_after_s
        self.resting_until = max(self.resting_until, now + rest_s)


class Servers:
    """All of them.

    Args:
        urls: Base URLs.
        concurrency: Requests that each server gets at once.
        give_up_after_s: Without any answer while no server can be used.
        check: Asks one server for an answer; returns if it can be used.

    Attributes:
        checking: Tasks that look whether a server is back, to be cancelled at the end.
    """

    def __init__(self, urls: list[str], concurrency: int, give_up_after_s: float, check: Check) -> None:
        self.all = [Server(url, concurrency) for url in urls]
        self.give_up_after_s = give_up_after_s
        self._check = check
        self._affinity: Affinity[Server] = Affinity(concurrency * len(urls))
        self._changed = asyncio.Event()
        self._unusable_since: float | None = None
        self.checking: set[asyncio.Task[None]] = set()

    async def acquire(self, key: str, avoid: set[Server]) -> Server:
        """A server that takes a request of this conversation now; to be given to `release`.

        Free servers outside `avoid` first, among them the one that answered this conversation before, else the one with
        the least to do.

        Raises:
            UserError: No server could be used for too long.
        """
        while not (free := [server for server in self.all if server.takes_more()]):
            await self._wait()
        last = self._affinity.get(key)
        server = min(free, key=lambda s: (s in avoid, s is not last, s.in_flight / s.limit))
        server.in_flight += 1
        return server

    def release(self, server: Server) -> None:
        server.in_flight -= 1
        self._wake()

    def answered(self, server: Server, key: str) -> None:
        """The server gave an answer, be it a refusal: it works, unless it was taken out in the meantime."""
        self._affinity.put(key, server)
        if not server.is_out:
            server.has_answered()
            self._unusable_since = None

    def gave_bad_answer(self, server: Server, problem: BadAnswer) -> None:
        server.bad_answers += 1
        if server.bad_answers >= BAD_ANSWERS_IN_A_ROW:
            self.take_out(server, str(problem))

    def take_out(self, server: Server, problem: str) -> None:
        """No more requests for this server until a check succeeds."""
        server.problem = problem
        if server.is_out:
            return
        server.is_out = True
        task = asyncio.ensure_future(self._check_until_back(server))
        self.checking.add(task)
        task.add_done_callback(self.checking.discard)
        if all(other.is_out for other in self.all):
            warn(
                f"no server answers ({self._problems()}): waiting up to {self.give_up_after_s:g} s for one to come back"
            )
        else:
            warn(f"{server.url}: {problem}; its requests go to the other servers")
        self._wake()

    async def _check_until_back(self, server: Server) -> None:
        while True:
            server.failures += 1
            await asyncio.sleep(backoff_s(server.failures))
            try:
                await self._check(server.url)
            except (Unreachable, BadAnswer) as problem:
                server.problem = str(problem)
            except UserError as mistake:
                if server.problem != str(mistake):
                    warn(f"{mistake}; it is left out")
                server.problem = str(mistake)
            except Throttled:
                break
            else:
                break
        server.is_out = False
        server.limit, server.threshold = 1.0, float(server.concurrency)
        server.bad_answers = BAD_ANSWERS_IN_A_ROW - 1  # on trial: the next bad answer takes it out again
        warn(f"{server.url} answers again")
        self._wake()

    async def _wait(self) -> None:
        """Until something changes, a rest is over or it is time to give up."""
        now = time.monotonic()
        moments = [server.resting_until for server in self.all if not server.is_out and server.resting_until > now]
        if not any(server.is_busy() for server in self.all):
            if self._unusable_since is None:
                self._unusable_since = now
            give_up_at = self._unusable_since + self.give_up_after_s
            if now >= give_up_at:
                raise UserError(
                    f"no server has answered for {self.give_up_after_s:g} s ({self._problems()}): start one again and "
                    "run the same command; nothing that was written is lost"
                )
            moments.append(give_up_at)
        with anyio.move_on_after(min(moments) - now if moments else None):
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _problems(self) -> str:
        return ", ".join(f"{server.url}: {server.problem}" for server in self.all)


def backoff_s(failures: int) -> float:
    """Exponential, with jitter so that requests that failed together do not come back together."""
    pause_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (min(failures, 32) - 1))
    return random.SystemRandom().uniform(pause_s / 2, pause_s)


def warn(message: str) -> None:
    """A line on stderr that leaves a progress bar whole."""
    tqdm.write(f"warning: {message}", file=sys.stderr)
