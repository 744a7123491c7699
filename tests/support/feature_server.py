"""A stand-in for a vLLM server of features: real features and greedy answers of a tiny target, faults on request."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from draftsmith.models.target.features import FINAL_FEATURES, target_features

ANSWER_TOKENS = 4  # before the end of an answer


class FeatureServer:
    """A server on `url`; it counts its `requests`, and answers with `fault` from request `fault_from` on.

    Faults: `ids` (other tokens), `nan`, `short` (a row too few), `layers` (a layer too few), `inner` (another
    inner layer), `dtype`, `damaged`,
    `unwritten` (no file but the reason), `busy` (HTTP 500), `long` (HTTP 400), `nothing` (no path), `dead` (closes the
    connection), `hang` (after 5 s), `other` (as another target), `slow` (after 0.1 s).
    """

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...], folder: Path) -> None:
        self.requests, self.fault, self.fault_from, self.fault_until = 0, "", 0, 1 << 30
        self._target, self._layers, self._folder, self._lock = target, layers, folder, threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"object": "list", "data": [{"id": "target", "object": "model"}]})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = outer.answer(asked)
                if status == 0:
                    self.connection.close()
                    return
                self._send(status, answer)

            def _send(self, status: int, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @torch.no_grad()
    def answer(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.requests += 1
            number = self.requests
        fault = self.fault if self.fault_from <= number < self.fault_until else ""
        time.sleep({"slow": 0.1, "hang": 5.0}.get(fault, 0.0))
        if fault in ("busy", "long", "dead", "hang"):
            return {"busy": 500, "long": 400}.get(fault, 0), {"message": "the prompt is too long"}
        sent, answer = asked["prompt"], list[int]()
        with_answer = (asked.get("kv_transfer_params") or {}).get("include_output_tokens", False)
        with self._lock:  # the hooks of features are for one forward at a time
            while len(answer) < min(asked["max_tokens"], ANSWER_TOKENS):
                answer.append(int(self._target(torch.tensor([sent + answer])).logits[0, -1].argmax()))
            if len(answer) < asked["max_tokens"]:
                answer.append(asked["stop_token_ids"][0])
            ids = torch.tensor([(sent + answer)[:-1] if with_answer else sent])
            parts = target_features(self._target, ids, layers=(*self._layers, FINAL_FEATURES))[0]
        *hidden, final = parts.chunk(len(self._layers) + 1, dim=-1)
        states = torch.stack(hidden, dim=1)
        logits = self._target.get_output_embeddings()(final)
        if fault == "other":
            logits = -logits
        likely = [None, *({str(int(row.argmax())): {"rank": 1}} for row in logits[:-1])]
        states = {
            "nan": states * float("nan"),
            "short": states[1:],
            "layers": states[:, 1:],
            "dtype": states.half(),
        }.get(fault, states)
        file = self._folder / f"cmpl-{number}-{id(self)}.safetensors"
        if fault == "unwritten":
            file.with_name(file.name + ".failed").write_text("OSError: no space left")
        elif fault == "damaged":
            file.write_bytes(b"damaged")
        else:
            ids_of_file = ids[0] + (fault == "ids")
            partial = file.with_suffix(".partial")
            layers = torch.tensor(self._layers) + torch.tensor([0, fault == "inner", 0])
            tensors = {"hidden_states": states.contiguous(), "token_ids": ids_of_file, "layers": layers}
            save_file(tensors, partial)
            partial.replace(file)
        ended = "length" if len(answer) <= ANSWER_TOKENS else "stop"
        choice = {"index": 0, "finish_reason": ended, "text": "", "token_ids": answer}
        choice |= {"prompt_token_ids": sent, "prompt_logprobs": likely}
        params = {} if fault == "nothing" else {"hidden_states_path": f"/elsewhere/{file.name}"}
        return 200, {"choices": [choice], "kv_transfer_params": params}


@contextmanager
def feature_server(target: PreTrainedModel, layers: tuple[int, ...], folder: Path) -> Iterator[FeatureServer]:
    server = FeatureServer(target, layers, folder)
    try:
        yield server
    finally:
        server.close()
