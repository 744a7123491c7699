"""Tokens per second, tau and latency of `draftsmith serve` by number of clients, with and without the drafter.

    python benchmarks/serving.py [--recipe R] [--clients 1 2 4 8] [--questions 8] [--new-tokens 96] [--json FILE]

Two servers run, each in a separate process, and take turns: one drafts, one has the target alone. Their first turns are
to warm up. All get the same questions, greedily; the clients share them. Every answer must equal the target's to one
client, whatever the other clients. Latency is from a request to its first and to its last token.
"""

import json
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from parts.timing import benchmark_parser, write_figures

from draftsmith.data.sources.questions import load_questions
from draftsmith.eval.commands.cli import app
from draftsmith.eval.serving.load_test import DRAFTING, PLAIN
from draftsmith.eval.serving.worker import Worker

PORTS = {PLAIN: 8791, DRAFTING: 8792}


@dataclass
class Answer:
    text: str
    tokens: int
    rounds: int
    first_token_s: float
    last_token_s: float


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--recipe")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    programs = {PLAIN: [__file__], DRAFTING: ["-m", "draftsmith.eval.commands.cli"]}
    with ExitStack() as stack:
        for arm, program in programs.items():
            words = ["serve", *([] if options.recipe is None else [options.recipe]), "--port", str(PORTS[arm])]
            words += ["--at-once", str(max(options.clients))]
            server = subprocess.Popen([sys.executable, *program, *words], stdout=subprocess.DEVNULL)
            stack.callback(server.wait)
            stack.callback(server.terminate)
        figures = measured(options)
    write_figures(options, figures)


def serve_without_drafter() -> None:
    """Run `draftsmith serve` as on this command line, with a worker that never drafts."""
    set_method = Worker._set_method
    with patch.object(Worker, "_set_method", lambda worker, running, is_alone: set_method(worker, running, False)):
        app()


def measured(options: Any) -> dict[str, Any]:
    questions = [question.turns[0] for question in load_questions("embedded")][: options.questions]
    arms = [(arm, clients) for clients in options.clients for arm in PORTS]
    turns: dict[tuple[str, int], list[list[Answer]]] = {arm: [] for arm in arms}
    rates: dict[tuple[str, int], list[float]] = {arm: [] for arm in arms}

    def answers_of(arm: str, clients: int) -> list[Answer]:
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(lambda text: ask(PORTS[arm], text, options.new_tokens), questions))

    for port in PORTS.values():
        wait_for_server(port)
    expected = [answer.text for answer in answers_of(PLAIN, 1)]
    for run in range(options.runs + 1):
        for arm in arms:
            began_s = time.perf_counter()
            answers = answers_of(*arm)
            wall_time_s = time.perf_counter() - began_s
            assert [answer.text for answer in answers] == expected, arm
            if run:  # the first is to warm up
                turns[arm].append(answers)
                rates[arm].append(sum(answer.tokens for answer in answers) / wall_time_s)
    rows = [row_of(arm, turns[arm], rates[arm], rates[PLAIN, arm[1]]) for arm in arms]
    return {"rows": rows, "questions": len(questions), "new_tokens": options.new_tokens}


def row_of(
    arm: tuple[str, int], turns: list[list[Answer]], rates: list[float], plain_rates: list[float]
) -> dict[str, Any]:
    """Return the figures of an arm, and print them. tau: tokens per round, over all answers."""
    answers = [answer for turn in turns for answer in turn]
    ratios = [rate / plain for rate, plain in zip(rates, plain_rates, strict=True)]
    rounds = sum(answer.rounds for answer in answers)
    latencies = {
        name: {"median": float(np.median(times_s)), "p95": float(np.percentile(times_s, 95))}
        for name in ("first_token_s", "last_token_s")
        if (times_s := [getattr(answer, name) for answer in answers])
    }
    row = {
        "arm": arm[0],
        "clients": arm[1],
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_by_run": rates,
        "speedup": statistics.median(ratios),
        "speedup_lowest": min(ratios),
        "speedup_highest": max(ratios),
        "tau": sum(answer.tokens - 1 for answer in answers) / rounds,
        **latencies,
    }
    times = ", ".join(f"{1000 * value:.0f}" for each in latencies.values() for value in each.values())
    print(
        f"{arm[1]} clients {arm[0]}: {row['tokens_per_s']:.1f} tokens/s, {row['speedup']:.2f}x, tau {row['tau']:.2f}, "
        f"ms to the first token (median, p95) and to the last: {times}"
    )
    return row


def ask(port: int, text: str, new_tokens: int) -> Answer:
    """Stream an answer; its tokens but the prefill's come in rounds, a piece each."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": new_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    texts, times_s, tokens, began_s = [], [], 0, time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=600) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            piece = json.loads(line.removeprefix(b"data: "))
            texts += [choice["delta"].get("content", "") for choice in piece["choices"]]
            if piece.get("draftsmith", {}).get("tokens"):
                times_s.append(time.perf_counter() - began_s)
            tokens = piece.get("usage", {}).get("completion_tokens", tokens)
    return Answer("".join(texts), tokens, len(times_s), times_s[0], times_s[-1])


def wait_for_server(port: int) -> None:
    for _ in range(600):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve_without_drafter()
    else:
        main()
