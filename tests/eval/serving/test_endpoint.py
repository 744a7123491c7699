"""A served endpoint: streamed answers, times, counters, and what is said where something is wrong."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from support.openai_setup import setting
from support.streaming_server import StreamingServer

from draftsmith.data.engines import openai_engine
from draftsmith.data.engines.engine import Failure, GenerationSettings, Request
from draftsmith.eval.serving.endpoint import DraftCounts, Endpoint, TimedCompletion
from draftsmith.recipes.errors import UserError


@contextmanager
def endpoint(**options: Any) -> Iterator[Any]:
    server = StreamingServer(**options)
    try:
        with closing(Endpoint(server.url + "/v1/", setting(), 16, api_key_env="MY_KEY")) as engine:
            yield server, engine
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    monkeypatch.setattr(openai_engine, "PROBE_PAUSE_S", 0.05)


def request(number: int = 0, max_new_tokens: int = 7) -> Request:
    return Request(f"{number}/0", [5, 6], [], GenerationSettings(max_new_tokens=max_new_tokens), 0)


def test_an_answer_comes_in_pieces() -> None:
    with endpoint(pause_s=0.05) as (server, engine):
        engine.submit(request())
        ((key, outcome),) = engine.collect()
        assert key == "0/0"
        assert isinstance(outcome, TimedCompletion)
        assert outcome.token_ids == [30, 31, 32, 33, 34, 35, 36]
        assert outcome.finish_reason == "length"
        # The first piece after one pause, the last one after four, whenever the first is read.
        assert outcome.first_token_s >= 0.05
        assert outcome.rest_s > 0
        assert outcome.first_token_s + outcome.rest_s >= 0.2
        # Counted only after the answer was sent: 3 rounds, one kept of the two drafted in each.
        assert engine.counts(7) == DraftCounts(3, 6, 3, (3, 0), 7)
    (body,) = server.bodies
    assert server.keys == ["Bearer sesame"]
    assert (body["model"], body["prompt"], body["stream"], body["stop_token_ids"]) == ("fake", [5, 6], True, [2])
    assert body["return_token_ids"]
    assert engine.max_length_tokens == 64


def test_many_at_once_and_one_that_breaks_off() -> None:
    with endpoint(breaks=(3,), pause_s=0.01) as (_, engine):
        for number in range(16):
            engine.submit(request(number))
        outcomes: dict[str, Any] = {}
        while len(outcomes) < 16:
            outcomes.update(engine.collect())
        failed = [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]
        assert failed == [Failure("answer broken off")]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"metrics": False},
            "/metrics shows no counters of vLLM's: it must be a vLLM server, without --disable-log-stats",
        ),
        ({"model": "other/name"}, "/v1 serves other/name, not wanted: every server must serve the same model"),
    ],
)
def test_a_server_that_is_not_the_right_one(options: dict[str, Any], sentence: str) -> None:
    wanted = "wanted" if "model" in options else None
    server = StreamingServer(**options)
    with pytest.raises(UserError) as error:
        Endpoint(server.url, setting(), 4, wanted)
    assert str(error.value) == f"{server.url}{sentence}"
    server.stop()


def test_a_server_that_is_down() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(UserError, match=rf"no server answers \({url}/v1: no connection .*correct --server"):
        Endpoint(url, setting(), 4)


def test_a_key_that_is_refused_ends_it() -> None:
    with endpoint(status=401) as (server, engine):
        engine.submit(request())
        with pytest.raises(UserError, match="says HTTP 401: The key is wrong: check --server "):
            engine.collect()
        assert len(server.bodies) == 1


def test_no_token_ids_is_no_vllm() -> None:
    with endpoint(token_ids=False) as (_, engine):
        engine.submit(request())
        with pytest.raises(UserError, match="gives no token ids: it must be a vLLM server that knows return_token_ids"):
            engine.collect()
