"""A server that streams answers and counts as vLLM or SGLang does: two drafted tokens a round, of which one is kept."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.fake_openai_server import BreakingHTTPServer

ANSWER = [[30], [31, 32], [33, 34], [35, 36]]  # the prefill's token, then three rounds


class StreamingServer:
    """Serves on `url`.

    Args:
        model: Its name.
        drafts: Count drafts.
        metrics: Show counters.
        breaks: Of the requests, by number from 1, those whose answer is cut off without an end.
        status: Of every answer.
        token_ids: Give them.
        engine: vllm or sglang.
        details: As SGLang from 0.5.20 on, give an answer's counts at its end, if asked for.
        pause_s: Before each piece of an answer, and before it is counted.

    `answer` is what it says, by pieces, after `first_event`; `others` are tokens of somebody else's for each answer.
    """

    def __init__(
        self,
        model: str = "fake",
        drafts: bool = True,
        metrics: bool = True,
        breaks: tuple[int, ...] = (),
        status: int = 200,
        token_ids: bool = True,
        pause_s: float = 0.0,
        engine: str = "vllm",
        details: bool = True,
    ) -> None:
        self.model, self.drafts, self.metrics, self.breaks = model, drafts, metrics, breaks
        self.status, self.token_ids, self.pause_s = status, token_ids, pause_s
        self.engine, self.details = engine, details
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.generated = self.rounds = self.others = 0
        self.answer = ANSWER
        self.first_event: Any = ANSWER  # sent before the answer; ANSWER: none
        self.lock = threading.Lock()
        self._http = BreakingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def page(self) -> str:
        if self.engine == "sglang":
            return self._sglang_page()
        lines = [f'vllm:generation_tokens_total{{engine="0"}} {self.generated}']
        if self.drafts:
            counts = {"drafts": self.rounds, "draft_tokens": 2 * self.rounds, "accepted_tokens": self.rounds}
            lines += [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {count}' for name, count in counts.items()]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{position="0"}} {self.rounds}', f'{name}{{position="1"}} 0']
        return "\n".join(lines) + "\n"

    def _sglang_page(self) -> str:
        """Counters have samples from the first request on; the gauge is of the last log interval."""
        lines = ["# TYPE sglang:spec_accept_length gauge", 'sglang:spec_accept_length{tp_rank="0"} 2.7']
        if self.generated:
            lines.append(f'sglang:generation_tokens_total{{is_streaming="true",model_name="m"}} {self.generated}.0')
        if self.drafts and self.rounds:
            lines.append(f'sglang:spec_verify_calls_total{{model_name="m"}} {self.rounds}.0')
        return "\n".join(lines) + "\n"

    def _last_piece(self, rounds: int) -> str:
        """Return SGLang's counts of an answer: all of its rounds accepted one of two draft tokens."""
        keys = (
            "spec_verify_ct",
            "spec_num_correct_drafts",
            "spec_num_proposed_drafts",
            "spec_correct_drafts_histogram",
        )
        details = dict(zip(keys, (rounds, rounds, 2 * rounds, [0, rounds]), strict=True))
        return f"data: {json.dumps({'choices': [], 'sglext': {'spec_tokens_details': details}})}\n\n"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self._send(200, json.dumps({"data": [{"id": server.model, "max_model_len": 64}]}))
                elif self.path == "/metrics" and server.metrics:
                    with server.lock:
                        self._send(200, server.page())
                else:
                    self._send(404, "{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.bodies.append(body)
                    server.keys.append(self.headers.get("Authorization"))
                    number = len(server.bodies)
                if server.status != 200:
                    self._send(server.status, json.dumps({"error": {"message": "The key is wrong"}}))
                    return
                self.send_response_only(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                pieces = server.answer[: 1 + (body["max_tokens"] // 2)]
                if server.first_event is not ANSWER:
                    self.wfile.write(f"data: {json.dumps(server.first_event)}\n\n".encode())
                for place, ids in enumerate(pieces):
                    time.sleep(server.pause_s)
                    if number in server.breaks and place == 1:
                        return
                    choice = {"index": 0, "text": "", "finish_reason": None}
                    choice |= {"token_ids": ids} if server.token_ids else {}
                    choice["finish_reason"] = "length" if place + 1 == len(pieces) else None
                    self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                    self.wfile.flush()
                rounds = len(pieces) - 1
                if server.drafts and server.details and rounds and body.get("return_spec_tokens_details"):
                    self.wfile.write(server._last_piece(rounds).encode())
                self.wfile.write(b"data: [DONE]\n\n")
                time.sleep(server.pause_s)
                with server.lock:  # vLLM counts when the tokens are on their way already
                    server.generated += sum(map(len, pieces)) + server.others
                    server.rounds += rounds

            def _send(self, status: int, text: str) -> None:
                self.send_response_only(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        return Handler
