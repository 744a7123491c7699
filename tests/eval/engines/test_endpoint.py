"""A served endpoint: streamed answers, times, counters, and errors."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from support.openai_setup import setting
from support.streaming_server import StreamingServer

from draftsmith.data.engines.engine import Failure, GenerationSettings, Request
from draftsmith.errors import UserError
from draftsmith.eval.engines import endpoint as endpoint_module
from draftsmith.eval.engines.endpoint import DraftCounts, Endpoint, SglangEndpoint, TimedAnswer


@contextmanager
def endpoint(**options: Any) -> Iterator[Any]:
    server = StreamingServer(**options)
    client = SglangEndpoint if server.engine == "sglang" else Endpoint
    try:
        with closing(client(server.url + "/v1/", setting(), api_key_env="MY_KEY")) as engine:
            yield server, engine
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")


def request(number: int = 0, max_new_tokens: int = 7) -> Request:
    return Request(f"{number}/0", [5, 6], GenerationSettings(max_new_tokens=max_new_tokens), 0)


def test_answer_is_streamed_in_pieces() -> None:
    with endpoint(pause_s=0.05) as (server, engine):
        outcome = engine.run(engine.answer(request()))
        assert isinstance(outcome, TimedAnswer)
        assert outcome.ids == [30, 31, 32, 33, 34, 35, 36]
        # The first piece comes after one pause, the last after four, whenever the first is read.
        assert outcome.first_token_s >= 0.05
        assert outcome.rest_s > 0
        assert outcome.first_token_s + outcome.rest_s >= 0.2
        assert engine._servers[0].client.timeout.connect == 60  # nothing is sent again
        # Counted after the answer was sent: 3 rounds, each with one of two draft tokens accepted.
        assert engine.counts(7) == DraftCounts(3, 6, 3, (3, 0), 7)
    (body,) = server.bodies
    assert server.keys == ["Bearer sesame"]
    assert (body["model"], body["prompt"], body["stream"], body["stop_token_ids"]) == ("fake", [5, 6], True, [2])
    assert body["return_token_ids"]
    assert engine.max_length_tokens == 64


def test_answer_that_breaks_off_is_reported() -> None:
    with endpoint(breaks=(1,)) as (_, engine):
        assert engine.run(engine.answer(request())) == Failure("answer broken off")
        assert isinstance(engine.run(engine.answer(request())), TimedAnswer)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"metrics": False},
            "/metrics has no counters of vLLM: start vLLM without --disable-log-stats",
        ),
        (
            {"metrics": False, "engine": "sglang"},
            "/metrics has no counters of SGLang: start SGLang with --enable-metrics",
        ),
        ({"model": "other/name"}, "/v1 serves other/name, not wanted: every server must serve the same model"),
    ],
)
def test_wrong_server_is_reported(options: dict[str, Any], sentence: str) -> None:
    wanted = "wanted" if "model" in options else None
    server = StreamingServer(**options)
    with pytest.raises(UserError) as error:
        (SglangEndpoint if server.engine == "sglang" else Endpoint)(server.url, setting(), wanted)
    assert str(error.value) == f"{server.url}{sentence}"
    server.stop()


def test_sglangs_answers_say_how_they_were_drafted() -> None:
    """Three rounds that accept 2, 0 and 2 of four drafted tokens, after a prefill; other clients change nothing."""
    with endpoint(engine="sglang") as (server, engine):
        server.others = 5
        assert engine.counts() == DraftCounts()
        details = {"spec_verify_ct": 3, "spec_num_proposed_drafts": 12, "spec_correct_drafts_histogram": [1, 0, 2]}
        engine._count_rounds(endpoint_module._DraftDetails.model_validate(details), 7)
        assert engine.counts() == DraftCounts(3, 12, 4, (2, 2, 0, 0), 0)
        assert isinstance(engine.run(engine.answer(request())), TimedAnswer)
        assert engine.counts(12) == DraftCounts(6, 18, 7, (5, 2, 0, 0), 12)
    assert server.bodies[0]["return_spec_tokens_details"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"status": 401}, "says HTTP 401: The key is wrong: check --server "),
        ({"token_ids": False}, "returns no token ids: give a server of vLLM that supports return_token_ids"),
    ],
)
def test_error_of_every_request_ends_the_run(options: dict[str, Any], sentence: str) -> None:
    with endpoint(**options) as (_, engine), pytest.raises(UserError, match=sentence):
        engine.run(engine.answer(request()))


PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 13.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="1"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 1.05e+02
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""


def test_counters_of_a_metrics_page() -> None:
    """Of one engine, of two behind one page, of another program, and without drafts."""
    counts = DraftCounts.of_page(PAGE, "vllm")
    assert counts == DraftCounts(10, 30, 13, (8, 4, 1), 105)
    assert counts.tau == pytest.approx(2.3)
    assert counts.acceptance_by_depth == [0.8, 0.4, 0.1]
    both = DraftCounts.of_page(PAGE + PAGE.replace('engine="0"', 'engine="1"'), "vllm")
    assert both == DraftCounts(20, 60, 26, (16, 8, 2), 210)
    assert DraftCounts.of_page('sglang:num_running_reqs{model="m"} 1.0\n', "vllm") is None
    without_drafts = DraftCounts.of_page('vllm:generation_tokens_total{engine="0"} 7.0\n', "vllm")
    assert without_drafts == DraftCounts(generated_tokens=7)
    assert without_drafts.tau is None
    assert without_drafts.acceptance_by_depth == []


def test_damaged_counters_are_refused() -> None:
    for old, new in (('drafts_total{engine="0",model_name="m"} 10.0', 'drafts_total{} NaN'), ("1.05e+02", "1e300"),
                     ("13.0", "many"), ("30.0", "-1"), ('position="2"', 'position="1000000000"')):  # fmt: skip
        assert old in PAGE
        with pytest.raises(ValueError, match=r"spec_decode|generation_tokens|could not convert"):
            DraftCounts.of_page(PAGE.replace(old, new), "vllm")


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        ({"choices": [{"token_ids": 7}]}, "malformed answer: choices.0.token_ids"),
        ({"choices": [{"token_ids": "abc"}]}, "malformed answer: choices.0.token_ids"),
        ({"choices": [{"token_ids": [2**70]}]}, "malformed answer: choices.0.token_ids.0"),
        ({"choices": [{"token_ids": [30] * 9}]}, "malformed answer: longer than max_new_tokens"),
        ({"choices": [{"token_ids": [10**6]}]}, "token ids outside the target's vocabulary"),
        ({"choices": [{"finish_reason": 7}]}, "malformed answer: choices.0.finish_reason"),
        ({"choices": [{"prompt_token_ids": [1]}]}, "answer of another prompt"),
        (None, "malformed answer: no JSON"),
        ({"sglext": {"spec_tokens_details": {"spec_verify_ct": 10**9, "spec_num_proposed_drafts": 1,
                                             "spec_correct_drafts_histogram": [10**9]}}}, "malformed answer: spec"),
    ],
)  # fmt: skip
def test_lying_server_costs_its_answer_only(piece: Any, reason: str) -> None:
    with endpoint(engine="sglang") as (server, engine):
        server.first_event = piece
        outcome = engine.run(engine.answer(request()))
        assert isinstance(outcome, Failure)
        assert reason in outcome.reason


def test_endless_answer_ends_at_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MOST_ANSWER_BYTES", 4096)
    with endpoint() as (server, engine):
        server.first_event = {"text": "x" * 5000}
        assert engine.run(engine.answer(request())) == Failure("answer of more than 0 MiB")
    with endpoint(pause_s=0.2) as (server, engine):
        engine.options.timeout_s = 0.1
        assert engine.run(engine.answer(request())) == Failure("answer broken off (TimeoutError)")


def test_counts_between_two_readings_and_of_our_own_rounds() -> None:
    """The first reading may precede the first draft. Rounds of depth 3, 3, 3 and 1 accepted 3, 0, 1 and 1 tokens."""
    first, last = DraftCounts(generated_tokens=2), DraftCounts(10, 30, 13, (8, 4, 1), 105)
    assert last - first == DraftCounts(10, 30, 13, (8, 4, 1), 103)
    assert DraftCounts.of_rounds([3, 0, 1, 1], [3, 3, 3, 1]) == DraftCounts(4, 10, 5, (3, 1, 1))
