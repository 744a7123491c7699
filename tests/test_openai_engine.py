"""The openai engine against servers that fail in every way: what is kept, what is said, what it costs."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import pytest
import tiny_tokenizers as templates
from fake_openai_server import END_ID, FakeServer, Fault, answer_ids
from tiny_tokenizers import tiny_tokenizer

from draftsmith.data import servers as servers_module
from draftsmith.data.engine import AnswerSampling, Completion, EngineSetting, Failure, Outcome, Request, open_engine
from draftsmith.data.openai_client import retry_after_s
from draftsmith.data.openai_engine import OpenAIEngine
from draftsmith.data.servers import Server
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe

TOKENIZER = tiny_tokenizer(templates.CHATML)
StartServer = Callable[..., FakeServer]
StartEngine = Callable[..., OpenAIEngine]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(servers_module, "LONGEST_PAUSE_S", 0.1)


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    started: list[FakeServer] = []

    def start(*script: Any, **how: Any) -> FakeServer:
        started.append(FakeServer(*script, **how))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    started: list[OpenAIEngine] = []

    def start(*servers: FakeServer, distill: dict[str, Any] | None = None, **options: Any) -> OpenAIEngine:
        options = {"base_urls": [server.url for server in servers], "timeout_s": 5, "give_up_after_s": 5, **options}
        engine = OpenAIEngine.make(OpenAIEngine.Options(**options), setting(**(distill or {})))
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


def setting(**distill: Any) -> EngineSetting:
    recipe = Recipe.model_validate({"name": "x", "data": {"distill": {"engine": "openai", **distill}}})
    return EngineSetting(recipe, TOKENIZER, "nowhere", (END_ID,), load_target=lambda: None)


def requests(count: int, **sampling: Any) -> list[Request]:
    drawn = AnswerSampling(**{"max_new_tokens": 32, **sampling})
    return [
        Request(f"c{n}", [5, 6, n], [{"role": "user", "content": f"question {n}"}], drawn, seed=2**62 + n)
        for n in range(count)
    ]


def run(engine: OpenAIEngine, asked: list[Request]) -> dict[str, Outcome]:
    for request in asked:
        engine.submit(request)
    outcomes: dict[str, Outcome] = {}
    while len(outcomes) < len(asked):
        for key, outcome in engine.collect():
            assert key not in outcomes
            outcomes[key] = outcome
    return outcomes


def right_answers(asked: list[Request]) -> dict[str, Outcome]:
    return {request.key: Completion(answer_ids(request.prompt_ids), "stop") for request in asked}


def test_every_request_gets_its_answer_within_the_concurrency(
    start_server: StartServer, start_engine: StartEngine
) -> None:
    four = threading.Barrier(4)

    def script(body: dict[str, Any], number: int) -> None:
        if number <= 4:  # answered only once four are there
            four.wait(timeout=10)

    server = start_server(script, max_model_len=77)
    engine = start_engine(server, concurrency_per_server=4)
    assert (engine.concurrency, engine.max_length_tokens) == (4, 77)
    asked = requests(40)
    assert run(engine, asked) == right_answers(asked)
    assert server.most_in_flight == 4
    assert server.requests[0] == {
        "model": "fake", "prompt": server.requests[0]["prompt"], "max_tokens": 32, "temperature": 0.0, "top_p": 1.0,
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop_token_ids": [END_ID], "return_token_ids": True,
    }  # fmt: skip


def test_sampling_seed_and_key_are_sent(
    start_server: StartServer, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server = start_server()
    engine = start_engine(server, api_key_env="MY_KEY")
    run(engine, requests(1, temperature=0.7, top_k=5, top_p=0.9))
    sent = server.requests[0]
    assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["seed"]) == (0.7, 5, 0.9, 2**62)
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_chat_and_text_without_token_ids(start_server: StartServer, start_engine: StartEngine) -> None:
    server = start_server(token_ids=False)
    engine = start_engine(server, api="chat")
    asked = requests(3)
    ids = {request.key: answer_ids(request.messages[-1])[:-1] for request in asked}
    assert run(engine, asked) == {
        key: Completion(None, "stop", " ".join(map(str, answer))) for key, answer in ids.items()
    }
    assert "prompt" not in server.requests[0]
    assert server.requests[0]["messages"] in [request.messages for request in asked]


def test_a_server_that_refuses_unknown_fields(start_server: StartServer, start_engine: StartEngine) -> None:
    server = start_server(fields={"model", "prompt", "max_tokens", "temperature", "top_p", "seed"})
    with pytest.raises(UserError, match=r"Unrecognized request argument: .*options.extensions: false"):
        start_engine(server)
    with pytest.raises(UserError, match="top_k is not of OpenAI's API"):
        start_engine(server, extensions=False, distill={"top_k": 5})
    asked = requests(2)
    assert run(start_engine(server, extensions=False), asked) == {
        request.key: Completion(None, "stop", " ".join(map(str, answer_ids(request.prompt_ids)[:-1])))
        for request in asked
    }


def test_another_chat_template_at_the_server(start_server: StartServer, start_engine: StartEngine) -> None:
    server = start_server()
    answer = {"prompt_token_ids": [1], "choices": [{"finish_reason": "stop", "message": {"content": "x"}}]}
    server.check_fault = Fault(body=answer)
    with pytest.raises(UserError, match=r"another chat template than the target's: set .*api: completions"):
        start_engine(server, api="chat")


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
    assert 0.4 < time.monotonic() - began < 3
    assert all(isinstance(outcome, Completion) for outcome in kept.values())
    assert len(kept) < 40


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


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_waited_for(start_server: StartServer, start_engine: StartEngine, as_date: bool) -> None:
    # The server's clock is years off: a date counts from its own.
    now = datetime(2001, 1, 1, tzinfo=timezone.utc)
    dates = {"Date": format_datetime(now, usegmt=True)}
    after = format_datetime(now + timedelta(seconds=1), usegmt=True) if as_date else "1"
    server = start_server(lambda body, number: Fault(429, {**dates, "Retry-After": after}, {}) if number == 1 else None)
    asked = requests(1)
    assert run(start_engine(server, max_attempts=1), asked) == right_answers(asked)
    assert 1.0 <= server.request_times[1] - server.request_times[0] < 2


def test_retry_after_that_makes_no_sense() -> None:
    assert retry_after_s({}) is None
    assert retry_after_s({"retry-after": "soon"}) is None
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
        return Fault(delay_s=1.0) if slow[prompt] >= 0 else None

    asked = requests(8)
    outcomes = run(start_engine(start_server(script), timeout_s=0.2, max_attempts=2), asked)
    assert outcomes == {**right_answers(asked), "c5": Failure("timeout")}


def test_empty_answers_and_answers_cut_by_length(start_server: StartServer, start_engine: StartEngine) -> None:
    def script(body: dict[str, Any], number: int) -> Fault | None:
        if body["prompt"][-1] != 0:
            return None
        return Fault(body={"choices": [{"finish_reason": "stop", "text": "", "token_ids": [END_ID]}]})

    asked = requests(9, max_new_tokens=3)
    outcomes = run(start_engine(start_server(script)), asked)
    assert outcomes["c0"] == Completion([END_ID], "stop")
    cut = [request for request in asked[1:] if len(answer_ids(request.prompt_ids)) > 3]
    assert len(cut) >= 3
    for request in cut:
        assert outcomes[request.key] == Completion(answer_ids(request.prompt_ids)[:3], "length")


@pytest.mark.parametrize(
    ("choice", "outcome"),
    [
        # vLLM's ids hold the stop token; some servers leave it out, and vLLM says which it was.
        ({"token_ids": [11, 12, END_ID], "stop_reason": END_ID}, Completion([11, 12, END_ID], "stop")),
        ({"token_ids": [11, 12], "stop_reason": END_ID}, Completion([11, 12, END_ID], "stop")),
        ({"token_ids": [11, 12]}, Completion(None, "stop", "11 12")),
        # A server that does not know our end token runs past it.
        ({"token_ids": [11, END_ID, 13, 14], "finish_reason": "length"}, Completion([11, END_ID], "stop")),
        ({"finish_reason": "length"}, Completion(None, "length", "11 12")),
        ({"finish_reason": "content_filter"}, Failure("finish reason content_filter")),
    ],
)  # fmt: skip
def test_answers_end_with_the_end_token(
    start_server: StartServer, start_engine: StartEngine, choice: dict[str, Any], outcome: Outcome
) -> None:
    answer = {"choices": [{"finish_reason": "stop", "text": "11 12", **choice}]}
    server = start_server(lambda body, number: Fault(body=answer))
    assert run(start_engine(server), requests(1)) == {"c0": outcome}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"choices": [', "malformed answer: no JSON"),
        (b"<html>\xff</html>", "malformed answer: no JSON"),
        ({"choices": []}, "malformed answer: choices"),
        ({"choices": [{"text": "x"}]}, "malformed answer: choices.0.finish_reason"),
        ({"choices": [{"finish_reason": "stop"}]}, "malformed answer: no text"),
        ([], "malformed answer: body"),
        ({"choices": [{"finish_reason": "abort", "text": ""}]}, "aborted by the server"),
    ],
)
def test_malformed_answers(start_server: StartServer, start_engine: StartEngine, body: Any, reason: str) -> None:
    """Request 1 gets it always, the others' first attempt."""
    seen = set()

    def script(sent: dict[str, Any], number: int) -> Fault | None:
        prompt = sent["prompt"][-1]
        if prompt == 1 or (prompt % 2 and prompt not in seen):
            seen.add(prompt)
            return Fault(body=body)
        return None

    asked = requests(8)
    outcomes = run(start_engine(start_server(script), max_attempts=3), asked)
    assert outcomes == {**right_answers(asked), "c1": Failure(reason)}


def test_a_refusal_is_final_and_counts_alike(start_server: StartServer, start_engine: StartEngine) -> None:
    def script(body: dict[str, Any], number: int) -> Fault | None:
        length = 600 + body["prompt"][-1]
        said = f"This model's maximum context length is 512 tokens. However, you requested {length} tokens."
        return Fault(400, body={"error": {"message": said, "code": 400}}) if body["prompt"][-1] in (2, 4) else None

    server = start_server(script)
    asked = requests(6)
    too_long = Failure("HTTP 400: This model's maximum context length is N tokens")
    assert run(start_engine(server), asked) == {**right_answers(asked), "c2": too_long, "c4": too_long}
    assert len(server.requests) == 6


def test_a_key_that_is_refused_stops_the_run(start_server: StartServer, start_engine: StartEngine) -> None:
    server = start_server(lambda body, number: Fault(401, body={"error": "Unauthorized"}))
    engine = start_engine(server)
    with pytest.raises(UserError, match=r"/v1/completions says HTTP 401: check base_urls .* api_key_env"):
        run(engine, requests(3))
    with pytest.raises(UserError, match="the environment has no variable NO_SUCH_KEY"):
        start_engine(server, api_key_env="NO_SUCH_KEY")
    with pytest.raises(UserError, match="HTTP 404: Not Found: check base_urls"):
        start_engine(server, base_urls=[server.url + "x"])


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
    time.sleep(0.4)
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


def test_servers_must_serve_the_same_model(
    start_server: StartServer, start_engine: StartEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = start_server(), start_server(model="other")
    with pytest.raises(UserError, match=r"not (fake|other): every server must serve the same model"):
        start_engine(first, other)
    with pytest.raises(UserError, match="serves fake, not mine"):
        start_engine(first, model="mine")
    other.stop()
    engine = start_engine(first, other)
    other.start()
    time.sleep(0.4)
    asked = requests(30)
    assert run(engine, asked) == right_answers(asked)
    assert not other.requests
    said = capsys.readouterr().err
    assert said.count("serves other, not fake: every server must serve the same model; it is left out") == 1


def test_the_shortest_context_counts(start_server: StartServer, start_engine: StartEngine) -> None:
    engine = start_engine(start_server(max_model_len=900), start_server(max_model_len=500), start_server())
    assert engine.max_length_tokens == 500


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
    slow, dead = start_server(lambda body, number: Fault(delay_s=2)), start_server()
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
    assert time.monotonic() - began < 1
    assert capsys.readouterr().err == ""


def test_the_recipe_opens_it(start_server: StartServer) -> None:
    server = start_server()
    with open_engine(setting(options={"base_urls": [server.url + "/"]})) as engine:
        engine.submit(requests(1)[0])
        assert engine.collect() == [("c0", Completion(answer_ids([5, 6, 0]), "stop"))]
    for wrong, message in [
        ({"base_urls": []}, "base_urls: List should have at least 1 item"),
        ({"base_urls": ["a:8000"]}, "a:8000 does not begin with http"),
        ({"base_urls": [server.url, server.url + "/"]}, "a server is named twice"),
        ({"base_url": "x"}, "the options of openai are base_urls, model, api"),
    ]:
        with pytest.raises(UserError, match=message), open_engine(setting(options=wrong)):
            pass
