"""What an answer costs the process that distils, apart from the server that gives it: milliseconds of its CPU.

    python benchmarks/distil_parent.py [--answers 1400] [--turns 1,7] [--tokens 200] [--rounds 3] [--json FILE]

The server is in a process of its own and answers at once with the same tokens; conversations are those of the standard
library, so many of them one after the other as `--turns` says; the tokenizer is the embedded target's.
"""

import json
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from parts.timing import benchmark_parser, write_figures
from transformers import AutoTokenizer

from draftsmith.data.distill.distill import distill
from draftsmith.data.engines.engine import EngineSetting, open_engine
from draftsmith.data.sources.conversation import open_records, parse_conversation
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe, SourceRecipe

END_ID, FIRST_ID = 2, 300  # the embedded target's end token, and one that is a word


def serve(tokens: int, port: Connection) -> None:
    """Answer every request with so many tokens, until the process is ended."""
    token_ids = [FIRST_ID + place % 50 for place in range(tokens - 1)] + [END_ID]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.give({"object": "list", "data": [{"id": "it", "object": "model", "max_model_len": 1 << 20}]})

        def do_POST(self) -> None:
            most = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
            choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": token_ids[-most:]}
            self.give({"id": "1", "object": "text_completion", "choices": [choice]})

        def give(self, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing: the terminal is the benchmark's."""

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 512

    server = Server(("127.0.0.1", 0), Handler)
    port.send(server.server_address[1])
    server.serve_forever()


def measure(source: Path, url: str, tokens: int, folder: Path) -> float:
    """Milliseconds of this process an answer."""
    from draftsmith.models.target.loading import EMBEDDED_TARGET

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    asked = {"engine": "openai", "max_new_tokens": tokens, "options": {"base_urls": [url]}}
    data = {"conversations": {"source": str(source)}, "distill": asked, "max_length_tokens": 1 << 16}
    recipe = Recipe.model_validate({"name": "parent", "runs_dir": str(folder), "data": data})
    setting = EngineSetting(recipe, tokenizer, "", (END_ID,))
    begin_s = time.process_time()
    report = distill(recipe, tokenizer, RunFolder(recipe), lambda: open_engine(setting), progress=False)
    return 1e3 * (time.process_time() - begin_s) / report.answers


def write_questions(file: Path, count: int, turns: int) -> None:
    """Conversations of so many of the standard library's questions, no two the same."""
    records = open_records(SourceRecipe(), "all")
    with file.open("w", encoding="utf-8") as stream:
        for number in range(count):
            questions = [parse_conversation(record, where) for where, record in islice(records, turns)]
            asked = [next(turn.content for turn in each.turns if turn.role == "user") for each in questions]
            stream.write(json.dumps({"turns": [f"({number}) {asked[0]}", *asked[1:]]}) + "\n")


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--turns", default="1,7")
    for name, by_default in (("answers", 1400), ("tokens", 200), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=by_default)
    options = parser.parse_args()
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(options.tokens, theirs), daemon=True)
    server.start()
    url, found = f"http://127.0.0.1:{ours.recv()}/v1", {}
    with tempfile.TemporaryDirectory() as folder:
        for turns in map(int, options.turns.split(",")):
            source = Path(folder) / f"{turns}.jsonl"
            write_questions(source, options.answers // turns, turns)
            rounds = range(options.rounds)
            taken = [measure(source, url, options.tokens, Path(folder) / f"{turns}-{number}") for number in rounds]
            found[turns] = {"milliseconds": median(taken), "all": taken}
            spread = f"{min(taken):.2f} to {max(taken):.2f}"
            print(f"{turns} turns: {median(taken):.2f} ms an answer of {options.tokens} tokens, {spread}")
    server.kill()
    write_figures(options, {"tokens": options.tokens, "answers": options.answers, "turns": found})


if __name__ == "__main__":
    main()
