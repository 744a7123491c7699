"""The environment of real vLLM in tests, and whether vLLM is installed."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
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
