"""The openai engine: its requests, how it reads responses, and outcomes of requests while servers fail."""

import gzip
import json
import threading
import time
import warnings
from collections import Counter
from typing import Any

import pytest
from support.fake_openai_server import END_ID, Fault
from support.openai_setup import (
    TOKENIZER,
    StartEngine,
    StartServer,
    requests,
    right_answers,
    run,
)

from draftsmith.data.engines import openai_answers
from draftsmith.data.engines.engine import Completion, Failure, Outcome
from draftsmith.data.engines.openai_answers import CONTROL_TOKENS, CUT_EARLY
from draftsmith.errors import UserError


def test_every_request_is_answered_within_the_concurrency(start_server: StartServer, start_engine: StartEngine) -> None:
    four = threading.Barrier(4)

    def script(body: dict[str, Any], number: int) -> None:
        if number <= 4:  # answered only when four are in flight
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
    monkeypatch.setenv("MY_KEY", "secret\r\n")  # with a newline, as read from a file
    monkeypatch.setenv("OPENAI_API_KEY", "somebody else's")
    server = start_server()
    run(start_engine(server, api_key_env="MY_KEY"), requests(1, temperature=0.7, top_k=5, top_p=0.9))
    sent = server.requests[0]
    assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["seed"]) == (0.7, 5, 0.9, 2**62)
    run(start_engine(server), requests(1))
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer secret", "Bearer none"]
    with pytest.raises(UserError, match="no environment variable NO_SUCH_KEY"):
        start_engine(server, api_key_env="NO_SUCH_KEY")


def test_server_that_refuses_unknown_fields(start_server: StartServer, start_engine: StartEngine) -> None:
    server = start_server(fields={"model", "prompt", "max_tokens", "temperature", "top_p", "seed"})
    with pytest.raises(UserError, match=r"Unrecognized request argument: .*fields that only vLLM has, as vLLM"):
        start_engine(server)


@pytest.mark.parametrize(
    ("choice", "outcome"),
    [
        # vLLM's ids include the stop token; some servers leave it out, and vLLM reports it.
        ({"token_ids": [11, 12, END_ID], "stop_reason": END_ID}, Completion([11, 12, END_ID], "stop")),
        ({"token_ids": [11, 12], "stop_reason": END_ID}, Completion([11, 12, END_ID], "stop")),
        ({"token_ids": [11, 12]}, Completion(None, "stop", "11 12")),
        ({"token_ids": [END_ID], "text": ""}, Completion([END_ID], "stop")),
        # A server that does not know the template's end token generates past it.
        ({"token_ids": [11, END_ID, 13, 14], "finish_reason": "length"}, Completion([11, END_ID], "stop")),
        ({"token_ids": [11, 12, 13, 14], "finish_reason": "length"}, Completion([11, 12, 13, 14], "length")),
        ({"finish_reason": "length"}, Completion(None, "length", "11 12")),
        ({"finish_reason": "content_filter"}, Failure("finish reason content_filter")),
        ({"finish_reason": "odd \x1b[2J\n one"}, Failure("finish reason odd [2J one")),
        # Its finish reason contradicts its length: a retry may return the whole answer.
        ({"token_ids": [11, 12, 13], "finish_reason": "length"}, Failure(CUT_EARLY)),
        ({"text": "1", "finish_reason": "length"}, Failure(CUT_EARLY)),
        # In the conversation it would be tokenised as the end of a turn, with loss, and a turn that nobody generated.
        ({"text": "11<|im_end|>\n<|im_start|>user"}, Failure(CONTROL_TOKENS)),
        ({"token_ids": [11, TOKENIZER.convert_tokens_to_ids("<|im_start|>"), END_ID]}, Failure(CONTROL_TOKENS)),
    ],
)  # fmt: skip
def test_end_of_an_answer_decides_its_outcome(
    start_server: StartServer, start_engine: StartEngine, choice: dict[str, Any], outcome: Outcome
) -> None:
    answer = {"choices": [{"finish_reason": "stop", "text": "11 12", **choice}]}
    server = start_server(lambda body, number: Fault(body=answer))
    assert run(start_engine(server), requests(1, max_new_tokens=4)) == {"c0": outcome}


def response_body(token_ids: list[int], finish_reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"finish_reason": finish_reason, "text": "x", "token_ids": token_ids}]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"choices": [', "malformed answer: no JSON"),
        ({"choices": []}, "malformed answer: choices"),
        ({"choices": [{"text": "x"}]}, "malformed answer: choices.0.finish_reason"),
        ({"choices": [{"finish_reason": "stop"}]}, "malformed answer: no text"),
        ([], "malformed answer: body"),
        ({"choices": [{"finish_reason": "abort", "text": ""}]}, "aborted by the server"),
        (response_body([11, len(TOKENIZER), END_ID]), "malformed answer: token ids outside the target's vocabulary"),
        (response_body([-1, END_ID]), "malformed answer: token ids outside the target's vocabulary"),
        (response_body([11] * 34, "length"), "malformed answer: longer than max_new_tokens"),
        (b'{"choices": ' + b"[" * 60_000, "malformed answer: no JSON"),
        (response_body(["11", END_ID]), "malformed answer: choices.0.token_ids.0"),  # type: ignore[list-item]
        (response_body([11.0, END_ID]), "malformed answer: choices.0.token_ids.0"),  # type: ignore[list-item]
        (response_body([True, END_ID]), "malformed answer: choices.0.token_ids.0"),
        ({"choices": [{"index": 1, "finish_reason": "stop", "text": "x"}]}, "malformed answer: choices.0.index"),
        (
            {"choices": [{"finish_reason": "stop", "text": "one " * 300}]},
            "malformed answer: longer than max_new_tokens",
        ),
        (response_body([11, END_ID]) | {"prompt_token_ids": [5, 6, 99]}, "answer of another prompt"),
        (
            {"choices": [{**response_body([11, END_ID])["choices"][0], "prompt_token_ids": [5, 6, 99]}]},
            "answer of another prompt",
        ),
    ],
)
def test_malformed_answers(start_server: StartServer, start_engine: StartEngine, body: Any, reason: str) -> None:
    """Request 1 always gets the malformed body, the other odd requests once."""
    seen = set()

    def script(sent: dict[str, Any], number: int) -> Fault | None:
        prompt = sent["prompt"][-1]
        if prompt == 1 or (prompt % 2 and prompt not in seen):
            seen.add(prompt)
            return Fault(body=body)
        return None

    asked = requests(8)
    assert run(start_engine(start_server(script), max_attempts=3), asked) == {
        **right_answers(asked),
        "c1": Failure(reason),
    }


def test_http_400_is_final_and_reasons_are_grouped(start_server: StartServer, start_engine: StartEngine) -> None:
    def script(body: dict[str, Any], number: int) -> Fault | None:
        length = 600 + body["prompt"][-1]
        said = f"This model's maximum context length is 512 tokens. However, you requested {length} tokens."
        return Fault(400, body={"error": {"message": said, "code": 400}}) if body["prompt"][-1] in (2, 4) else None

    server = start_server(script)
    asked = requests(6)
    too_long = Failure("HTTP 400: This model's maximum context length is N tokens", is_final=True)
    assert run(start_engine(server), asked) == {**right_answers(asked), "c2": too_long, "c4": too_long}
    assert len(server.requests) == 6


@pytest.mark.parametrize("status", [401, 402, 410])
def test_http_status_about_the_server_ends_the_run(
    start_server: StartServer, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-abc-1")
    server = start_server(lambda body, number: Fault(status, body={"error": {"message": "No key sk-abc-1 here"}}))
    engine = start_engine(server, api_key_env="MY_KEY")
    with pytest.raises(UserError, match=rf"/v1 says HTTP {status}: No key \*\*\* here: check .*base_urls"):
        run(engine, requests(3))


def test_servers_must_serve_the_same_model(start_server: StartServer, start_engine: StartEngine) -> None:
    """Their names are printed without control characters."""
    first, other = start_server(), start_server(model="other")
    with pytest.raises(UserError, match=r"not (fake|other): every server must serve the same model"):
        start_engine(first, other)
    with pytest.raises(UserError, match="serves fake, not mine"):
        start_engine(first, model="mine")
    with pytest.raises(UserError, match=r"HTTP 404: Not Found: check .*base_urls"):
        start_engine(first, base_urls=[first.url + "x"])
    odd = start_server(model="a\x1b[2J\nb")
    with pytest.raises(UserError, match=r"serves a \[2J b, not mine"):
        start_engine(odd, model="mine")
    assert run(start_engine(odd), requests(1)) == right_answers(requests(1))


def test_servers_that_go_and_come_back(
    start_server: StartServer, start_engine: StartEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The requests of a dead server move to the other one, and are sent again when both are gone and one restarts."""
    both = [start_server(lambda body, number: Fault(delay_s=0.02)) for _ in range(2)]
    engine = start_engine(*both, concurrency_per_server=4, max_attempts=2)
    asked = requests(80)
    for request in asked:
        engine.submit(request)
    outcomes = dict(engine.collect())
    both[0].stop()
    while len(outcomes) < 40:
        outcomes.update(engine.collect())
    both[1].stop()
    restart = threading.Timer(0.5, both[0].start)
    restart.start()
    while len(outcomes) < len(asked):
        outcomes.update(engine.collect())
    restart.join()
    assert outcomes == right_answers(asked)
    said = capsys.readouterr().err
    for server in both:
        assert f"warning: {server.url}: no connection" in said
    assert f"warning: {both[0].url} answers again" in said


def test_server_that_fails_every_request_fails_no_conversation(
    start_server: StartServer, start_engine: StartEngine
) -> None:
    """It fails fast, so that it would always have the fewest requests."""
    broken = start_server(lambda body, number: Fault(500, body={"error": "boom"}))
    working = start_server(lambda body, number: Fault(delay_s=0.02))
    asked = requests(40)
    assert run(start_engine(broken, working, max_attempts=2), asked) == right_answers(asked)
    assert len(working.requests) == len(asked)


def test_no_request_fails_when_all_servers_stay_down(start_server: StartServer, start_engine: StartEngine) -> None:
    both = [start_server(lambda body, number: Fault(delay_s=0.02)) for _ in range(2)]
    engine = start_engine(*both, concurrency_per_server=2, give_up_after_s=0.2, max_attempts=2)
    for request in requests(40):
        engine.submit(request)
    kept = dict(engine.collect())
    for server in both:
        server.stop()
    with pytest.raises(UserError, match=r"no server has answered for 0.2 s \(http.*run the same command"):
        kept.update(outcome for _ in range(40) for outcome in engine.collect())
    assert all(isinstance(outcome, Completion) for outcome in kept.values())
    assert len(kept) < 40


def test_redirect_is_not_followed(start_server: StartServer, start_engine: StartEngine) -> None:
    """Another host would get the prompts, and its answers would count as the target's."""
    other = start_server()
    server = start_server(lambda body, number: Fault(307, {"Location": f"{other.url}/completions?key=secret"}, {}))
    engine = start_engine(server)
    with pytest.raises(
        UserError, match=r"redirects to http://127.0.0.1:\d+ \(HTTP 307\), which is not followed"
    ) as told:
        run(engine, requests(3))
    assert "secret" not in str(told.value)
    assert not other.requests


def test_slow_response_times_out_as_a_whole(start_server: StartServer, start_engine: StartEngine) -> None:
    """Each byte arrives within the timeout, the response does not."""
    server = start_server(lambda body, number: Fault(drip_s=0.05) if body["prompt"][-1] == 1 else None)
    asked = requests(3)
    began = time.monotonic()
    outcomes = run(start_engine(server, timeout_s=0.2, max_attempts=1), asked)
    assert outcomes == {**right_answers(asked), "c1": Failure("timeout")}
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("is_packed", [False, True])
def test_too_large_response_is_a_failure(
    start_server: StartServer, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    monkeypatch.setattr(openai_answers, "MOST_ANSWER_BYTES", 1 << 20)
    large = json.dumps(response_body([11, END_ID]) | {"padding": "x" * (2 << 20)}).encode()
    headers = {"Content-Encoding": "gzip"} if is_packed else {}
    fault = Fault(headers=headers, body=gzip.compress(large) if is_packed else large)
    server = start_server(lambda body, number: fault if body["prompt"][-1] == 1 else None)
    asked = requests(3)
    outcomes = run(start_engine(server, max_attempts=1), asked)
    assert outcomes == {**right_answers(asked), "c1": Failure("answer of more than 1 MiB")}


def test_server_that_is_always_busy_is_given_up(start_server: StartServer, start_engine: StartEngine) -> None:
    """No conversation fails meanwhile."""
    busy = Fault(429, {"Retry-After": "0.01"}, {"error": {"message": "busy"}})
    server = start_server(lambda body, number: busy)
    engine = start_engine(server, max_attempts=2, give_up_after_s=0.3, concurrency_per_server=4)
    with pytest.raises(UserError, match=r"no server has answered for 0.3 s .*HTTP 429: busy"):
        run(engine, requests(30))


def test_http_429_costs_no_attempt(start_server: StartServer, start_engine: StartEngine) -> None:
    """The server accepts two concurrent requests and gets sixteen."""

    def script(body: dict[str, Any], number: int) -> Fault:
        if server.in_flight > 2:
            return Fault(429, {"Retry-After": "0.01"}, {"error": {"message": "busy"}})
        return Fault(delay_s=0.005)

    server = start_server(script)
    asked = requests(40)
    assert run(start_engine(server, concurrency_per_server=16, max_attempts=1), asked) == right_answers(asked)
    assert len(server.requests) > len(asked)


def test_http_500_is_retried_and_a_failed_request_stops_no_other(
    start_server: StartServer, start_engine: StartEngine
) -> None:
    seen: Counter[str] = Counter()

    def script(body: dict[str, Any], number: int) -> Fault | None:
        prompt = str(body["prompt"])
        seen[prompt] += 1
        poisoned = body["prompt"][-1] == 7
        return Fault(500, body={"error": "boom"}) if poisoned or (number % 9 == 1 and seen[prompt] == 1) else None

    asked = requests(20)
    outcomes = run(start_engine(start_server(script), max_attempts=2, concurrency_per_server=4), asked)
    assert outcomes == {**right_answers(asked), "c7": Failure("HTTP 500")}
    assert seen["[5, 6, 7]"] == 2 * 3  # the client tries three times


def test_closing_with_requests_in_flight_is_quick_and_quiet(
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
