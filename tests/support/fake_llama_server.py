"""`llama-server` without a model: answers every prompt with the tokens that count upwards from its last one.

`fake_llama` makes it a program of a folder, with `llama-quantize` beside it. What it was started with and asked is
written to `calls.jsonl` there. With a file `dies` there it ends at once.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PROMPT_MS, TOKEN_MS = 7.0, 4.0
CALLS = Path(__file__).with_name("calls.jsonl")


def fake_llama(folder: Path) -> Path:
    """Make `llama-server`, and `llama-quantize`, which copies."""
    folder.mkdir()
    scripts = {
        "llama-server": f"#!{sys.executable}\n{Path(__file__).read_text()}",
        "llama-quantize": f'#!/bin/sh\necho "$1 $4" >>{folder}/quantized\ncp "$2" "$3"\n',
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder / "llama-server"


def note(what: object) -> None:
    with CALLS.open("a") as file:
        file.write(json.dumps(what) + "\n")


class Handler(BaseHTTPRequestHandler):
    starts_in = 2  # looks at its health until it has "loaded" its model

    def do_GET(self) -> None:
        Handler.starts_in -= 1
        self._say(503 if Handler.starts_in > 0 else 200, {"path": self.path})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note(asked)
        if asked["prompt"] == [13]:
            self._say(400, {"error": "unlucky"})
            return
        count = asked["n_predict"]
        tokens = [asked["prompt"][-1] + 1 + index for index in range(count)]
        timings = {"prompt_ms": PROMPT_MS, "predicted_n": count, "predicted_ms": TOKEN_MS * (count - 1)}
        self._say(200, {"tokens": tokens, "timings": timings})

    def log_message(self, *_: object) -> None:
        pass

    def _say(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    note([os.getpid(), *sys.argv[1:]])
    if Path(__file__).with_name("dies").exists():
        print("loading\nerror: no such tensor")
        sys.exit(3)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
