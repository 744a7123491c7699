"""`draftsmith serve` with OpenAI's client: answers equal the target's, and no request can end the server."""

import base64
import hashlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2
import openai
import pytest
from support.tiny_runs import recipe_file, untrained_run

from draftsmith.data.engines.server_process import free_port
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.record_reader import parse_conversation
from draftsmith.eval.speculative_decoder import SpeculativeDecoder
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.schema import Recipe
from draftsmith.serve.api import application
from draftsmith.serve.protection import LARGEST_BODY_BYTES, Guard
from draftsmith.serve.requests import ChatRequest
from draftsmith.serve.server import listening
from draftsmith.serve.worker import (
    CompletedAnswer,
    Job,
    Worker,
)

KEY = "secret-key"
QUESTIONS = [f"What does {name} do?" for name in ("os.path.join", "json.dumps", "re.match", "time.sleep", "sorted")]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    method = {"name": "tree", "tree": "best_first", "nodes": 6, "branch": 3, "lookup": True}
    return untrained_run(tmp_path_factory.mktemp("serve"), methods=[method])


@pytest.fixture(scope="module")
def greedy(recipe: Recipe) -> dict[str, list[int]]:
    """Return the target's answers without a drafter."""
    target, tokenizer = load_target(recipe.target)
    with SpeculativeDecoder(target, tokenizer) as decoder:
        return {question: decoder.ask(question, NEW_TOKENS).ids for question in QUESTIONS}


class RunningServer:
    def __init__(self, recipe: Recipe, waiting: int = 64) -> None:
        self.finished: list[CompletedAnswer] = []
        self.worker = Worker(recipe, waiting, self.finished.append)
        self.worker.warm_up()
        self._working = threading.Thread(target=self.worker.work, daemon=True)
        self._working.start()
        port = free_port()
        self._stack = ExitStack()
        self._stack.enter_context(listening(application(self.worker, KEY), "127.0.0.1", port, connections=80))
        self.root = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.root}/v1", api_key=KEY, max_retries=0)
        self.http = httpx2.Client(base_url=self.root, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

    def stop(self) -> None:
        self.worker.stop()
        self._working.join(timeout=20)
        self._stack.close()

    def ask(self, question: str, **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": question}]
        given = {"temperature": 0, "max_tokens": NEW_TOKENS, **options}
        return self.client.chat.completions.create(model="embedded", messages=messages, **given)

    def post(self, body: Any) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})


@pytest.fixture(scope="module")
def running(recipe: Recipe) -> Iterator[RunningServer]:
    started = RunningServer(recipe)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def small(recipe: Recipe) -> Iterator[RunningServer]:
    """Return a server with a queue of two, whose connections are not those of other tests."""
    started = RunningServer(recipe, waiting=2)
    yield started
    started.stop()


def test_fifty_concurrent_answers_equal_the_targets(running: RunningServer, greedy: dict[str, list[int]]) -> None:
    tokenizer = running.worker.tokenizer
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(running.ask, QUESTIONS * 10))
    for question, answer in zip(QUESTIONS * 10, answers, strict=True):
        ids = greedy[question]
        assert answer.choices[0].message.content == tokenizer.decode(ids, skip_special_tokens=True)
        assert answer.usage.completion_tokens == len(ids)
        assert sum(answer.draftsmith["tokens_per_round"]) == len(ids) - 1  # the first token comes with the prompt
        assert answer.choices[0].finish_reason == ("stop" if ids[-1] in running.worker.end_ids else "length")
    told = sorted(each.record.ids for each in running.finished[-50:])
    assert told == sorted(greedy[question] for question in QUESTIONS * 10)


def test_streamed_answer_equals_the_whole(running: RunningServer, greedy: dict[str, list[int]]) -> None:
    """The pieces have the same text and token count; accepted draft tokens start each piece."""
    for question in QUESTIONS:
        pieces = list(running.ask(question, stream=True, stream_options={"include_usage": True}))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == running.worker.tokenizer.decode(greedy[question], skip_special_tokens=True)
        own = [(piece.choices[0].delta.content, piece.draftsmith) for piece in pieces if hasattr(piece, "draftsmith")]
        assert sum(response["tokens"] for _, response in own) == len(greedy[question]) - 1
        assert all(text_content.startswith(response["drafted_text"]) for text_content, response in own)
        assert pieces[-1].usage.completion_tokens == len(greedy[question])
        assert pieces[-2].choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_cut_off(running: RunningServer, greedy: dict[str, list[int]], stream: bool) -> None:
    """The text ends before the string, even if it spans tokens and rounds."""
    whole = running.worker.tokenizer.decode(greedy[QUESTIONS[0]], skip_special_tokens=True)
    stop = whole[12:17]
    answer = running.ask(QUESTIONS[0], stop=[stop, "never said"], stream=stream)
    if stream:
        pieces = list(answer)
        text, reason = "".join(p.choices[0].delta.content or "" for p in pieces), pieces[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == (whole[: whole.index(stop)], "stop")


def test_long_bodies_are_refused_unread(running: RunningServer) -> None:
    for body in (iter([b"{", b"}"]), b" " * (LARGEST_BODY_BYTES + 1)):
        too_long = running.http.post("/v1/chat/completions", content=body)
        assert (too_long.status_code, "must have a Content-Length of at most" in too_long.text) == (413, True)


def test_pages(running: RunningServer) -> None:
    (model,) = running.client.models.list().data
    assert model.id == "embedded"
    assert httpx2.get(f"{running.root}/health").json() == {"status": "ok"}
    page = httpx2.get(running.root).text
    assert "draftsmith" in page
    assert "://" not in page  # no request leaves the machine


def said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}], **more}


ASKED = said("x")
INVALID: list[tuple[Any, str]] = [
    (b"{not json", "JSON"),
    (b"[]", "body"),
    (b"\xff\xfe", ""),
    ({"messages": []}, "messages"),
    (said("x", "tool"), "the last message has role tool"),
    (said("x", "alien"), 'messages, turn 1: unknown role "alien"'),
    (said([{"type": "image_url"}]), 'messages, turn 1: a part of the turn must be text, not "image_url"'),
    (said(None), "messages, turn 1: the turn must be text, not null"),
    ({"messages": [ASKED["messages"][0] | {"cache": True}]}, "messages, turn 1: `cache` is not supported here"),
    (said("x", tools=[{"type": "function"}]), "tools: not supported here"),
    (said("x", tool_choice="required"), "tool_choice: not supported here"),
    (said("x", response_format={"type": "json_object"}), "response_format: not supported here"),
    (b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}', "a text holds half a surrogate"),
    (b'{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}', "a text holds half a surrogate"),
    (b'{"messages": ' + b"[" * 2000 + b"]" * 2000 + b"}", ""),
    (said("x", "assistant"), "the last message has role assistant, but must have role user"),
    (said("x", logprobs=True), "logprobs: not supported here"),
    (said("x", n=2), "n: "),
    (said("x", temperature=-1), "temperature"),
    (said("x", max_tokens=0), "max_tokens"),
    (said("x", stop=["a"] * 5), "stop: List should have at most 4 items"),
    (said("x", stop=""), "stop"),
    (said("word " * 3000), "the prompt has"),
]


def test_messages_are_read_as_those_of_records() -> None:
    """So what is served has the prompt that was trained on."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    thinking = {"role": "assistant", "content": None, "reasoning": "hm"}
    messages = [{"role": "developer", "content": ""}, {"role": "user", "content": parts, "name": "A"}, thinking]
    turns = (Turn("system", ""), Turn("user", "one\ntwo", name="A"), Turn("assistant", "", reasoning_content="hm"))
    assert ChatRequest.model_validate({"messages": messages}).turns == turns
    assert parse_conversation({"messages": messages[1:2]}, "").turns == turns[1:2]


@pytest.mark.parametrize(("body", "message"), INVALID, ids=range(len(INVALID)))
def test_invalid_requests_are_refused(running: RunningServer, body: Any, message: str) -> None:
    response = running.post(body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_only_own_host_names_are_accepted() -> None:
    """DNS rebinding: a page of evil.example that resolves to this machine sends that name in each request."""
    guard = Guard(None, ["gpu1", "*.lab.example"])
    for host in ("127.0.0.1:8000", "[::1]:8000", "192.168.1.7", "localhost:1", "LOCALHOST.", "gpu1", "a.lab.example:80",
                 ""):  # fmt: skip
        assert guard._is_ours(host), host
    for host in ("evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "xlab.example", "::1.evil"):
        assert not guard._is_ours(host), host
        assert Guard(None, ["*"])._is_ours(host)


def test_foreign_hosts_and_origins_are_refused(running: RunningServer) -> None:
    """They are recognised by the host name, or by a body that is not JSON, as a cross-origin page would send it."""
    rebound = running.http.post("/v1/chat/completions", json=ASKED, headers={"Host": "evil.example:8000"})
    assert (rebound.status_code, "evil.example:8000 is no name of this server" in rebound.text) == (421, True)
    assert running.http.get("/", headers={"Host": "evil.example"}).status_code == 421
    body = json.dumps(ASKED).encode()
    for kind in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"},
                 {"Content-Type": "text/plain; application/json"}):  # fmt: skip
        response = running.http.post("/v1/chat/completions", content=body, headers=kind)
        assert (response.status_code, "Content-Type: application/json" in response.json()["error"]["message"]) == (
            415,
            True,
        )
    typed = {"Content-Type": "application/json; charset=utf-8"}
    assert running.http.post("/v1/chat/completions", content=b"{}", headers=typed).status_code == 400


def test_every_error_has_openais_format(running: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for method, path, status in (("GET", "/v2", 404), ("PUT", "/v1/models", 405), ("GET", "/health/", 404)):
        response = running.http.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, status)
    monkeypatch.setattr("draftsmith.serve.api.usage", lambda _: 1 / 0)
    response = running.post({**ASKED, "max_tokens": 2})
    assert response.json()["error"] == {"message": "the request failed", "type": "server_error", "code": 500}
    assert response.headers["connection"] == "close"  # a request sent on it next could be lost


def test_long_text_does_not_block_other_requests(running: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tokenised outside the event loop; text that cannot fit is not tokenised."""
    held, begun = threading.Event(), threading.Event()

    def slowly(*_: Any) -> list[int]:
        begun.set()
        held.wait(20)
        return [5, 6, 7]

    monkeypatch.setattr("draftsmith.serve.requests.token_ids", slowly)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(running.post, {**ASKED, "max_tokens": 2})
        assert begun.wait(10)
        assert httpx2.get(f"{running.root}/health", timeout=5).status_code == 200
        held.set()
        assert waiting.result().status_code == 200
    monkeypatch.setattr("draftsmith.serve.requests.token_ids", lambda *_: 1 / 0)
    huge = running.post({"messages": [{"role": "user", "content": "a-" * 500_000}]})
    assert (huge.status_code, "characters, too many for" in huge.text) == (400, True)


def test_wrong_key_is_refused(running: RunningServer) -> None:
    assert httpx2.get(f"{running.root}/v1/models", headers={"Authorization": "Bearer x"}).status_code == 401
    assert httpx2.get(f"{running.root}/v1/models", headers={"Authorization": f"bearer {KEY}"}).status_code == 200
    with pytest.raises(openai.AuthenticationError, match="the API key is wrong or missing"):
        openai.OpenAI(base_url=f"{running.root}/v1", api_key="no", max_retries=0).models.list()


def test_full_queue_and_disconnected_client(small: RunningServer, greedy: dict[str, list[int]]) -> None:
    """Streams that wait are told their place, and again when it changes."""
    held, jobs = threading.Event(), small.worker.jobs
    jobs.put(Job([5, 6, 7], 4, Sampling(), 0, (), lambda _: held.wait(20)))
    while jobs.qsize():
        time.sleep(0.01)
    with ThreadPoolExecutor(2) as pool:
        waiting = []
        for number, question in enumerate(QUESTIONS[:2], start=1):
            waiting.append(pool.submit(lambda asked: list(small.ask(asked, stream=True)), question))
            while jobs.qsize() < number:
                time.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="the queue is full"):
            small.ask(QUESTIONS[2])
        held.set()
        for question, answer, places in zip(QUESTIONS, waiting, ([1], [2, 1]), strict=False):
            pieces = answer.result()
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert text == small.worker.tokenizer.decode(greedy[question], skip_special_tokens=True)
            own = [piece.draftsmith for piece in pieces if hasattr(piece, "draftsmith")]
            assert [each["waiting"] for each in own if "waiting" in each] == places
    stream = small.ask("Tell me about the module os.", stream=True, max_tokens=900, temperature=2.0, seed=3)
    next(iter(stream))
    stream.close()
    assert small.ask(QUESTIONS[0]).choices[0].message.content
    assert max(len(each.record.ids) for each in small.finished) <= NEW_TOKENS


@pytest.mark.slow
def test_serve_command_answers_until_interrupted(recipe: Recipe, greedy: dict[str, list[int]]) -> None:
    """The models run in the main thread, with one OpenMP team; a signal ends it, and a used port is one sentence."""
    port = free_port()
    command = [sys.executable, "-m", "draftsmith.cli.main", "serve", recipe_file(recipe), "--port", str(port)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with started as process, ExitStack() as first:
        first.callback(process.kill)  # before the wait, even if the test fails
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)
        messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
        for _ in range(600):
            try:
                response = client.chat.completions.create(
                    model="any", messages=messages, temperature=0, max_tokens=NEW_TOKENS
                )
                break
            except openai.APIConnectionError:
                time.sleep(0.1)
        assert response.usage is not None
        assert response.usage.completion_tokens == len(greedy[QUESTIONS[0]])
        second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert (second.returncode, second.stderr.count("give another --port or --host")) == (2, 1)
        process.send_signal(signal.SIGTERM)  # like Ctrl-C, which may be ignored in a background process
        assert process.wait(timeout=30) == 143
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_page_runs_only_its_own_script(running: RunningServer) -> None:
    page = running.http.get("/")
    policy = page.headers["content-security-policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-inline" not in policy
    assert not re.search(r"\s(style|on\w+)=", page.text)  # which the policy would block
