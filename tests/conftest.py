"""Settings made before any test runs; `FIXTURES` are modules with fixtures that several test files share."""

import gc
import os

import pytest

FIXTURES = ("support.tiny_runs", "support.finished_run", "support.openai_setup")


def pytest_configure(config: pytest.Config) -> None:
    """Import what tests need, and build the CPU kernels into the user's cache before a test changes its path.

    Not in the process that only hands out tests to workers, which would wait for the imports. Tests on a GPU need no
    kernels.
    """
    if config.getoption("dist", "no") != "no":
        return
    gc.disable()
    from draftsmith.models.compiling import SWITCH
    from draftsmith.models.kernels.cpu_library import has_kernels

    # Compiling takes longer than the tested code, so tests that need it enable it. Subprocesses inherit this.
    os.environ.setdefault(SWITCH, "0")
    if config.option.markexpr != "cuda":
        has_kernels()
    for name in FIXTURES:
        config.pluginmanager.import_plugin(name)


def pytest_collection_finish() -> None:
    """Exempt all that was imported from garbage collection, which would take a quarter of the tests' time."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
