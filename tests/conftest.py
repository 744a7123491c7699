"""Fixtures shared by several test files, and settings made before any test runs."""

import os
from collections.abc import Iterator

import openai
import pytest
import torch
from support.openai_setup import StartEngine, StartServer, starting_engines, starting_servers

from draftsmith.data.engines import openai_engine
from draftsmith.models.compiling import SWITCH
from draftsmith.models.cpu_kernels import has_kernels

# Compiling takes longer than the tested code, so tests that need it enable it. Subprocesses inherit this.
os.environ.setdefault(SWITCH, "0")


def pytest_configure(config: pytest.Config) -> None:
    """Build the CPU kernels into the user's cache before a test changes its path. Tests on a GPU need none."""
    if config.option.markexpr != "cuda":
        has_kernels()


# Modules with fixtures, each before those that import it.
pytest_plugins = ["support.tiny_runs", "support.finished_run", "support.tiny_disk"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    with starting_servers() as start:
        yield start


@pytest.fixture
def start_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartEngine]:
    """Start openai engines with short pauses."""
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr(openai._base_client, "MAX_RETRY_DELAY", 0.05)
    monkeypatch.setattr(openai_engine, "PROBE_PAUSE_S", 0.05)
    with starting_engines() as start:
        yield start
