"""A real vLLM server for tests."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from draftsmith.data.engines.vllm_engine import free_port

NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
START_S = 300.0
# For vLLM on a few cores: one thread, no pinned processes, no usage statistics.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def vllm_environment() -> Iterator[None]:
    """Set the environment of every module that imports this fixture."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    yield
    os.environ.clear()
    os.environ.update(before)


class VllmServer:
    """A server on `url` once `__init__` has returned; `stop` ends it and its child processes.

    Args:
        command: Starts with `python`, replaced by this interpreter.
    """

    def __init__(self, log: Path, command: Sequence[str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/v1"
        common = ["--served-model-name", "embedded", "--enforce-eager", "--max-model-len", "512"]
        common += ["--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, *command[1:], *common],
                env=os.environ | ENVIRONMENT, stdout=stream, stderr=stream, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait(f"http://127.0.0.1:{port}/health", log)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _wait(self, health: str, log: Path) -> None:
        began = time.monotonic()
        while time.monotonic() - began < START_S and self._process.poll() is None:
            try:
                urllib.request.urlopen(health, timeout=2)
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-3000:]}")
