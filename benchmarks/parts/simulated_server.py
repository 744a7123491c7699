"""An OpenAI-compatible server that only takes its time: continuous batching, simulated.

A step takes `step_s + sequence_s * batch + prefill_s * new prompt tokens`, as on a GPU whose memory bandwidth the
weights share with every sequence's KV cache. Requests join at a step's beginning while the batch has room; prompts are
cached in blocks of 16 tokens, as in vLLM. Answer lengths are log-normal and follow from the prompt alone.
"""

import json
import multiprocessing
import random
import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Latencies:
    """Defaults: about an 8B model in bf16 on one H100.

    answer_median, answer_sigma: of the log-normal answer lengths, in tokens and natural logarithms.
    """

    step_s: float = 8e-3
    sequence_s: float = 5e-5
    prefill_s: float = 4e-5
    batch: int = 32
    answer_median: float = 50.0
    answer_sigma: float = 0.9
    word_id: int = 100


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


class SimulatedServer:
    """Runs in a process of its own from `__init__` to `stop`."""

    def __init__(self, latencies: Latencies) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(latencies, theirs), daemon=True)
        self._process.start()
        self.url = f"http://127.0.0.1:{ours.recv()}/v1"

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


@dataclass
class _Sequence:
    new_prompt_tokens: int
    left: int
    done: threading.Event = field(default_factory=threading.Event)


class _Batch:
    """The clock: one thread that takes steps."""

    def __init__(self, latencies: Latencies) -> None:
        self.latencies = latencies
        self._waiting: deque[_Sequence] = deque()
        self._cached: set[int] = set()
        self._arrived = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def generate(self, prompt: list[int], most_tokens: int) -> int:
        """Wait as long as the answer takes; its length in tokens, the end token included."""
        spread = random.Random(zlib.crc32(json.dumps(prompt).encode()))
        drawn = spread.lognormvariate(0, self.latencies.answer_sigma) * self.latencies.answer_median
        sequence = _Sequence(self._uncached(prompt), max(2, min(int(drawn), most_tokens)))
        length = sequence.left
        self._waiting.append(sequence)
        self._arrived.release()
        sequence.done.wait()
        self._uncached(prompt + [self.latencies.word_id] * (length - 1))
        return length

    def _uncached(self, ids: list[int]) -> int:
        """How many tokens are in no cached block; they are from now on."""
        prefix, new = 0, len(ids) % BLOCK_TOKENS
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            prefix = hash((prefix, *ids[start : start + BLOCK_TOKENS]))
            if prefix not in self._cached:
                self._cached.add(prefix)
                new += BLOCK_TOKENS
        return new

    def _run(self) -> None:
        running: list[_Sequence] = []
        latencies, now = self.latencies, time.monotonic()
        while True:
            if not running:
                self._arrived.acquire()
                self._arrived.release()
                now = time.monotonic()
            new_tokens = 0
            while len(running) < latencies.batch and self._arrived.acquire(blocking=False):
                running.append(self._waiting.popleft())
                new_tokens += running[-1].new_prompt_tokens
            now += latencies.step_s + latencies.sequence_s * len(running) + latencies.prefill_s * new_tokens
            time.sleep(max(0.0, now - time.monotonic()))
            for sequence in running:
                sequence.left -= 1
                if sequence.left == 0:
                    sequence.done.set()
            running = [sequence for sequence in running if sequence.left]


def _serve(latencies: Latencies, parent: Connection) -> None:
    batch = _Batch(latencies)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": "simulated"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            length = batch.generate(body["prompt"], body["max_tokens"])
            ids = [latencies.word_id] * (length - 1) + [body["stop_token_ids"][0]]
            self._send({"choices": [{"finish_reason": "stop", "text": "", "token_ids": ids}]})

        def _send(self, answer: object) -> None:
            data = json.dumps(answer).encode()
            self.send_response_only(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    http = _HTTPServer(("127.0.0.1", 0), Handler)
    parent.send(http.server_address[1])
    http.serve_forever()
