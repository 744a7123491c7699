"""An OpenAI-compatible server in a thread: deterministic answers, and faults on demand.

Its answer is a function of the prompt's ids, so a test knows the answer of every request, whichever server gives it and
however often it is sent.
"""

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END_ID = 2
MODEL = "fake"


def answer_ids(prompt: Any) -> list[int]:
    """Return 1 to 9 ids and the end token."""
    digest = zlib.crc32(json.dumps(prompt).encode())
    return [10 + digest % 50 + position for position in range(1 + digest % 9)] + [END_ID]


class BreakingHTTPServer(ThreadingHTTPServer):
    """Listener of the fake servers: it accepts many concurrent connections, which may break."""

    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: connections break on purpose."""


@dataclass
class Fault:
    """Fault that a request gets instead of its answer.

    status, headers, body: of the response; a body of bytes is sent as it is.
    delay_s: before it.
    drip_s: before each of its bytes; the answer itself, if there is no body.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    delay_s: float = 0.0
    drip_s: float = 0.0


# Gets the request's JSON and its number at this server, from 1; returns None for the ordinary answer.
Script = Callable[[dict[str, Any], int], Fault | None]


class FakeServer:
    """A server on `url`; `stop` closes every connection, `start` listens on the same port again.

    Args:
        script: Faults; not called for the one-token request by which the engine checks a server.
        fields: Known fields; a request with another one is refused, as by strict servers. None: all are known.
    """

    def __init__(
        self,
        script: Script = lambda body, number: None,
        model: str = MODEL,
        max_model_len: int | None = None,
        fields: set[str] | None = None,
        port: int = 0,
    ) -> None:
        self.script, self.model, self.max_model_len = script, model, max_model_len
        self.fields = fields
        self.requests: list[dict[str, Any]] = []
        self.check_fault: Fault | None = None
        self.in_flight = self.most_in_flight = 0
        self.headers: list[Message] = []  # case-insensitive names
        self._lock = threading.Lock()
        self._connections: set[Any] = set()
        self._http: BreakingHTTPServer | None = None
        self._port = port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        self._http = BreakingHTTPServer(("127.0.0.1", self._port), self._handler())
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        if self._http is None:
            return
        self._http.shutdown()
        self._http.server_close()
        self._http = None
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(2)

    def answer(self, body: dict[str, Any]) -> Fault:
        """Return the ordinary response."""
        if self.fields is not None and (unknown := sorted(body.keys() - self.fields)):
            return Fault(400, body={"error": {"message": f"Unrecognized request argument: {unknown[0]}"}})
        ids = answer_ids(body["prompt"])[: body["max_tokens"]]
        stopped = ids[-1] == END_ID
        text = " ".join(map(str, ids[:-1] if stopped else ids))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if stopped else "length", "text": text}
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}  # as vLLM
        return Fault(body={"object": "text_completion", "model": self.model, "choices": [choice]})

    def _post(self, body: dict[str, Any], headers: Message) -> Fault:
        if body["max_tokens"] == 1:
            if self.check_fault is not None:
                time.sleep(self.check_fault.delay_s)
            return self.check_fault or self.answer(body)
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            number = len(self.requests)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            fault = self.script(body, number)
            if fault is not None:
                time.sleep(fault.delay_s)
            if fault is None or fault == Fault(delay_s=fault.delay_s, drip_s=fault.drip_s):
                return replace(self.answer(body), drip_s=fault.drip_s if fault else 0.0)
            return fault
        finally:
            with self._lock:
                self.in_flight -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                server._connections.add(self.connection)

            def finish(self) -> None:
                server._connections.discard(self.connection)
                super().finish()

            def do_GET(self) -> None:
                if self.path == "/health":
                    self._send(Fault(body={}))
                    return
                card = {"id": server.model, "object": "model"}
                if server.max_model_len is not None:
                    card["max_model_len"] = server.max_model_len
                self._send(Fault(body={"object": "list", "data": [card]}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != "/v1/completions":
                    self._send(Fault(404, body={"detail": "Not Found"}))
                    return
                self._send(server._post(body, self.headers))

            def _send(self, response: Fault) -> None:
                data = response.body if isinstance(response.body, bytes) else json.dumps(response.body).encode()
                self.send_response_only(response.status)
                for name, value in {"Content-Type": "application/json", **response.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if not response.drip_s:
                    self.wfile.write(data)
                    return
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    time.sleep(response.drip_s)

        return Handler
