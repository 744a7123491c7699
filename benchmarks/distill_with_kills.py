"""Distillation under fire: two vLLM servers, one of them killed and started again, the client SIGKILLed three times.

    make vllm-env
    python benchmarks/distill_with_kills.py chats.jsonl more_chats.jsonl.xz --server-python .venv-vllm/bin/python

Takes `--conversations` of the files in equal shares, distils them through the `openai` engine with the embedded target,
and checks afterwards what the ledger promises: every conversation is done exactly once or has a recorded reason, no
line counts twice, and at most the answers in flight when the client was killed were asked for again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from draftsmith.data.distill.ledger_db import LEDGER_FILE
from draftsmith.data.distill.ledger_view import LedgerView
from draftsmith.data.sources.mixture import load_conversations
from draftsmith.models.target.loading import EMBEDDED_TARGET
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.results import write_result

CLIENT_KILLS = 3
START_S = 240.0
RECIPE = """
name: kills
runs_dir: {runs}
data:
  max_length_tokens: 480
  conversations: {{mixture: {mixture}, limit: {limit}, skip_invalid: true}}
  distill:
    engine: openai
    max_new_tokens: 64
    options: {{base_urls: [{urls}], concurrency_per_server: 16}}
"""


class Server:
    """A vLLM server with the embedded target on a port of its own."""

    def __init__(self, python: str, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._python, self._log = python, log
        self.start()

    def start(self) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        }  # fmt: skip
        options = ["--model", str(EMBEDDED_TARGET), "--served-model-name", "embedded", "--dtype", "float32"]
        options += ["--enforce-eager", "--max-model-len", "512", "--port", str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", "vllm.entrypoints.openai.api_server", *options],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        began = time.monotonic()
        while time.monotonic() - began < START_S:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
                return
            except OSError:
                time.sleep(0.5)
        raise SystemExit(f"the server did not start within {START_S:.0f} s: see {self._log}")

    def kill(self) -> None:
        """With everything that it has started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="conversations, ShareGPT or OpenAI messages")
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--server-python", default=sys.executable, help="of an environment that has vLLM")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="distill-kills-") as folder:
        result = run(options, Path(folder))
    print(json.dumps(result, indent=2))
    if options.json:
        write_result(options.json, result)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    servers = [Server(options.server_python, folder / f"server{number}.log") for number in range(2)]
    try:
        for server in servers:
            server.wait()
        recipe = folder / "kills.yaml"
        urls = ", ".join(server.url for server in servers)
        mixture = json.dumps([{"source": str(file)} for file in options.files])
        recipe.write_text(RECIPE.format(runs=folder / "runs", mixture=mixture, limit=options.conversations, urls=urls))
        ids = {conversation.id for conversation in load_conversations(load_recipe(recipe))}
        data = folder / "runs" / "kills" / "data"
        began = time.perf_counter()
        kills = under_fire(servers, recipe, data, len(ids))
        seconds = time.perf_counter() - began
    finally:
        for server in servers:
            server.kill()
    return check(data, ids) | {"seconds": round(seconds), "kills": kills}


def under_fire(servers: list[Server], recipe: Path, data: Path, count: int) -> list[str]:
    """Kill the client at 1/5, 2/5 and 3/5 of the conversations, a server at 1/10; it is back at 3/10."""
    log: list[str] = []
    plan = [(0.1, "server"), (0.2, "client"), (0.3, "server back"), (0.4, "client"), (0.6, "client")]
    client = start_client(recipe)
    for share, what in plan:
        while settled(data) < share * count:
            if client.poll() is not None:
                raise SystemExit(f"the client ended with code {client.returncode} before the plan was through")
            time.sleep(0.2)
        log.append(f"{what} at {settled(data)}")
        if what == "client":
            client.send_signal(signal.SIGKILL)
            client.wait()
            client = start_client(recipe)
        elif what == "server":
            servers[1].kill()
        else:
            servers[1].start()
    if client.wait() != 0:
        raise SystemExit(f"the client ended with code {client.returncode}")
    return log


def start_client(recipe: Path) -> Any:
    return subprocess.Popen([sys.executable, "-m", "draftsmith.eval.commands.cli", "distill", str(recipe)])


def settled(data: Path) -> int:
    if not (data / LEDGER_FILE).exists():
        return 0
    counts = LedgerView(data).counts()
    return sum(counts.get(state, Counter()).total() for state in ("done", "truncated", "failed"))


def check(data: Path, ids: set[str]) -> dict[str, Any]:
    """What the ledger and the shards say.

    Raises:
        SystemExit: A conversation is missing, is there twice or has no reason.
    """
    view = LedgerView(data)
    counts = view.counts()
    kept = [record["id"] for record in view.records()]
    written = [
        json.loads(line)["id"]
        for file in sorted((data / "shards").glob("*.jsonl"))
        for line in file.open()
        if line.endswith("\n")
    ]
    failed = counts.get("failed", Counter())
    problems = [
        name
        for name, wrong in (
            ("unknown ids", not set(kept) <= ids),
            ("lines twice", len(written) != len(set(written))),
            ("lines that do not count", set(written) != set(kept)),
            ("conversations not settled", settled(data) != len(ids)),
            ("failures without a reason", failed[""] > 0),
        )
        if wrong
    ]
    if problems:
        raise SystemExit(f"NOT HELD: {', '.join(problems)}")
    return {
        "conversations": len(ids),
        "done": counts.get("done", Counter()).total(),
        "truncated": dict(counts.get("truncated", Counter())),
        "failed": dict(failed),
        "lines": len(written),
    }


if __name__ == "__main__":
    main()
