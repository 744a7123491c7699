"""Servers that fail in every way: what is kept, what is said, what it costs."""

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from support.fake_openai_server import FakeServer, Fault
from support.openai_setup import StartEngine, StartServer, eventually, requests, right_answers, run

from draftsmith.data.engines.engine import Completion, Failure
from draftsmith.data.engines.openai_client import retry_after_s
from draftsmith.data.engines.servers import Server
from draftsmith.recipes.errors import UserError


def test_a_server_down_at_the_start_is_named(start_server: StartServer, start_engine: StartEngine) -> None:
    server = start_server()
    server.stop()
    with pytest.raises(UserError, match=rf"no server answers \({server.url}: no connection .*base_urls"):
        start_engine(server)


def test_a_server_that_dies_and_comes_back(
    start_server: StartServer, start_engine: StartEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server(lambda body, number: Fault(delay_s=0.02))
    engine = start_engine(server, concurrency_per_server=4)
    asked = requests(40)
    for request in asked:
        engine.submit(request)
    outcomes = dict(engine.collect())
    server.stop()
    time.sleep(0.3)
    server.start()
    while len(outcomes) < len(asked):
        outcomes.update(engine.collect())
    assert outcomes == right_answers(asked)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith(f"warning: no server answers ({server.url}: ")
    assert said[0].endswith("waiting up to 5 s for one to come back")
    assert said[1] == f"warning: {server.url} answers again"


def test_when_all_servers_stay_down_nothing_is_given_up_as_failed(
    start_server: StartServer, start_engine: StartEngine
) -> None:
    both = [start_server(lambda body, number: Fault(delay_s=0.02)) for _ in range(2)]
    engine = start_engine(*both, concurrency_per_server=2, give_up_after_s=0.5, max_attempts=2)
    for request in requests(40):
        engine.submit(request)
    kept = dict(engine.collect())
    for server in both:
        server.stop()
    began = time.monotonic()
    with pytest.raises(UserError, match=r"no server has answered for 0.5 s .*run the same command"):
        kept.update(outcome for _ in range(40) for outcome in engine.collect())
    assert 0.4 < time.monotonic() - began < 10
    assert all(isinstance(outcome, Completion) for outcome in kept.values())
    assert len(kept) < 40


def test_an_answer_from_before_the_outage_does_not_stop_the_clock(
    start_server: StartServer, start_engine: StartEngine
) -> None:
    """Two requests; the second loses its connection, which takes the server out, before the first is answered."""
    server = start_server(lambda body, number: Fault(hang_up=True, delay_s=0.2) if number == 2 else Fault(delay_s=0.5))
    engine = start_engine(server, give_up_after_s=1.0)
    server.check_fault = Fault(500, body={})
    first, second = requests(2)
    engine.submit(first)
    eventually(lambda: len(server.requests) == 1)
    engine.submit(second)
    assert engine.collect() == list(right_answers([first]).items())
    with pytest.raises(UserError, match=r"no server has answered for 1 s"):
        engine.collect()


def test_a_storm_of_429_costs_no_attempt_and_shrinks_the_concurrency(
    start_server: StartServer, start_engine: StartEngine
) -> None:
    capacity = 2
    server: FakeServer

    def script(body: dict[str, Any], number: int) -> Fault:
        if server.in_flight > capacity:
            return Fault(429, {"Retry-After": "0"}, {"error": {"message": "busy"}})
        return Fault(delay_s=0.02)

    server = start_server(script)
    engine = start_engine(server, concurrency_per_server=16, max_attempts=1)
    asked = requests(60)
    assert run(engine, asked) == right_answers(asked)
    refused = len(server.requests) - len(asked)
    # Without shrinking nearly all of the 58 that wait would be refused again after every answer.
    assert 14 <= refused < 120


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 204])
def test_a_redirect_to_a_login_costs_no_conversation(
    start_server: StartServer, start_engine: StartEngine, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """The page that it leads to is not asked for; requests wait until the server answers again."""
    login = Fault(status, {"Location": "/login"}, {"page": "x" * 10**6} if status != 204 else b"")

    def script(body: dict[str, Any], number: int) -> Fault | None:
        return login if 5 <= number < 12 else Fault(delay_s=0.01)

    server = start_server(script)
    asked = requests(40)
    assert run(start_engine(server, max_attempts=1, concurrency_per_server=4), asked) == right_answers(asked)
    assert capsys.readouterr().err.startswith(f"warning: no server answers ({server.url}: HTTP {status}")


def test_a_redirect_at_the_start_is_named(start_server: StartServer, start_engine: StartEngine) -> None:
    server = start_server()
    server.check_fault = Fault(307, {"Location": "https://elsewhere/v1"}, {})
    with pytest.raises(UserError, match=r"no server answers \(.*: HTTP 307, a redirect\).*base_urls"):
        start_engine(server)


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_waited_for(start_server: StartServer, start_engine: StartEngine, as_date: bool) -> None:
    # The server's clock is years off: a date counts from its own.
    now = datetime(2001, 1, 1, tzinfo=UTC)
    dates = {"Date": format_datetime(now, usegmt=True)}
    after = format_datetime(now + timedelta(seconds=1), usegmt=True) if as_date else "1"
    server = start_server(lambda body, number: Fault(429, {**dates, "Retry-After": after}, {}) if number == 1 else None)
    asked = requests(1)
    assert run(start_engine(server, max_attempts=1), asked) == right_answers(asked)
    assert 1.0 <= server.request_times[1] - server.request_times[0] < 2


def test_retry_after_that_makes_no_sense() -> None:
    assert retry_after_s({}) is None
    assert retry_after_s({"retry-after": "soon"}) is None
    assert retry_after_s({"retry-after": "\xb2"}) is None
    assert retry_after_s({"retry-after": "Fri, 31 Dec 99999999999 23:59:59 GMT"}) is None
    assert retry_after_s({"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}) is None  # no Date to count from
    dates = {"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT", "date": "Sat, 01 Jan 2000 00:00:09 GMT"}
    assert retry_after_s(dates) == 0


def test_429_for_ever_ends(start_server: StartServer, start_engine: StartEngine) -> None:
    server = start_server(lambda body, number: Fault(429, {}, {}))
    engine = start_engine(server, give_up_after_s=0.3)
    with pytest.raises(UserError, match=r"no server has answered for 0.3 s .*HTTP 429"):
        run(engine, requests(5))


def test_the_limit_halves_once_for_a_burst_and_grows_again() -> None:
    server = Server("http://x", 64)
    sent_at = time.monotonic()
    for _ in range(10):
        server.throttle(0.0, sent_at)
    assert server.limit == 32
    server.throttle(0.0, time.monotonic())
    assert server.limit == 16
    server.limit = 1.0  # back from an outage: doubles with every round of answers up to the threshold, then creeps
    for answers, limit in [(1, 2), (2, 4), (4, 8), (8, 16)]:
        for _ in range(answers):
            server.has_answered()
        assert server.limit == limit
    for _ in range(16):
        server.has_answered()
    assert 16.9 < server.limit < 17
    for _ in range(10_000):
        server.has_answered()
    assert server.limit == 64


def test_http_500_is_tried_again_and_a_request_that_always_fails_stops_nothing(
    start_server: StartServer, start_engine: StartEngine
) -> None:
    seen: dict[str, int] = {}

    def script(body: dict[str, Any], number: int) -> Fault | None:
        prompt = str(body["prompt"])
        seen[prompt] = seen.get(prompt, 0) + 1
        poisoned = body["prompt"][-1] == 7
        return Fault(500, body={"error": "boom"}) if poisoned or (number % 9 == 1 and seen[prompt] == 1) else None

    server = start_server(script)
    asked = requests(20)
    outcomes = run(start_engine(server, max_attempts=4, concurrency_per_server=4), asked)
    assert outcomes == {**right_answers(asked), "c7": Failure("HTTP 500")}
    assert seen["[5, 6, 7]"] == 4


def test_a_server_that_answers_nothing_but_500_loses_no_conversation(
    start_server: StartServer, start_engine: StartEngine
) -> None:
    server = start_server(lambda body, number: Fault(500, body={}))
    engine = start_engine(server, max_attempts=3, give_up_after_s=0.5)
    server.check_fault = Fault(500, body={})
    with pytest.raises(UserError, match=r"no server has answered for 0.5 s .*HTTP 500"):
        run(engine, requests(30))


def test_timeouts(start_server: StartServer, start_engine: StartEngine) -> None:
    """Request 3 is slow once, request 5 always."""
    slow = {3: 1, 5: 99}

    def script(body: dict[str, Any], number: int) -> Fault | None:
        prompt = body["prompt"][-1]
        slow[prompt] = slow.get(prompt, 0) - 1
        return Fault(delay_s=2.0) if slow[prompt] >= 0 else None

    asked = requests(8)
    outcomes = run(start_engine(start_server(script), timeout_s=1, max_attempts=2), asked)
    assert outcomes == {**right_answers(asked), "c5": Failure("timeout")}


def test_one_of_two_servers_is_dead_at_the_start(
    start_server: StartServer, start_engine: StartEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, alive = start_server(), start_server(lambda body, number: Fault(delay_s=0.01))
    dead.stop()
    engine = start_engine(dead, alive, concurrency_per_server=2)
    asked = requests(20)
    assert run(engine, asked) == right_answers(asked)
    assert len(alive.requests) == 20
    assert capsys.readouterr().err.startswith(f"warning: {dead.url}: no connection")
    dead.start()
    eventually(lambda: not engine._servers.all[0].is_out)
    asked = requests(20)
    assert run(engine, asked) == right_answers(asked)
    assert len(dead.requests) > 0
    assert capsys.readouterr().err == f"warning: {dead.url} answers again\n"


def test_a_server_that_dies_hands_its_requests_to_the_other(
    start_server: StartServer, start_engine: StartEngine
) -> None:
    both = [start_server(lambda body, number: Fault(delay_s=0.02)) for _ in range(2)]
    engine = start_engine(*both, concurrency_per_server=4, max_attempts=2)
    asked = requests(60)
    for request in asked:
        engine.submit(request)
    outcomes = dict(engine.collect())
    both[0].stop()
    while len(outcomes) < len(asked):
        outcomes.update(engine.collect())
    assert outcomes == right_answers(asked)


def test_later_turns_go_where_the_first_was_answered(start_server: StartServer, start_engine: StartEngine) -> None:
    both = [start_server(), start_server()]
    engine = start_engine(*both, concurrency_per_server=8)
    asked = requests(8)
    for _ in range(3):
        run(engine, asked)
    places = [{tuple(body["prompt"]) for body in server.requests} for server in both]
    assert places[0].isdisjoint(places[1])
    assert [len(server.requests) for server in both] == [12, 12]


def test_a_jumping_clock_changes_nothing(
    start_server: StartServer, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter(range(1, 10**9))
    monkeypatch.setattr(time, "time", lambda: (-1) ** next(jumps) * 1e9)
    server = start_server(
        lambda body, number: Fault(429, {"Retry-After": "0"}, {}) if number == 1 else Fault(delay_s=0.01)
    )
    engine = start_engine(server, concurrency_per_server=4)
    asked = requests(20)
    for request in asked:
        engine.submit(request)
    outcomes = dict(engine.collect())
    server.stop()
    time.sleep(0.1)
    server.start()
    began = time.monotonic()
    while len(outcomes) < len(asked):
        outcomes.update(engine.collect())
    assert outcomes == right_answers(asked)
    assert time.monotonic() - began < 5


def test_closing_in_the_middle_is_quick_and_quiet(
    start_server: StartServer, start_engine: StartEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, dead = start_server(lambda body, number: Fault(delay_s=20)), start_server()
    dead.stop()
    engine = start_engine(slow, dead, concurrency_per_server=2)
    for request in requests(10):
        engine.submit(request)
    capsys.readouterr()
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.close()
        engine.close()
    assert time.monotonic() - began < 5
    assert capsys.readouterr().err == ""


@pytest.fixture
def _interrupts_raise() -> Iterator[None]:
    """What starts a process in the background, as shells do, leaves SIGINT ignored in it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts_raise")
def test_an_interrupt_while_connecting_leaves_nothing_behind(
    start_server: StartServer, start_engine: StartEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server()
    server.check_fault = Fault(delay_s=20)

    def interrupt() -> None:
        """To the process, as Ctrl-C: it comes to the main thread, which waits for the server."""
        eventually(lambda: server.checks > 0)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyboardInterrupt):
            start_engine(server)
        gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "openai-engine"]
    assert capsys.readouterr().err == ""
