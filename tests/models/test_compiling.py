"""Errors of compiled functions, and the fallbacks. The tests compile nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

from draftsmith.errors import UserError
from draftsmith.models import compiling
from draftsmith.models.compiling import Graphs


def failing_call(monkeypatch: pytest.MonkeyPatch, error: Exception, device: str, good_calls: int) -> Callable[[], Any]:
    """Return a call that raises this error after `good_calls` runs of its function, counting replays."""
    results = iter(range(good_calls))

    def run(*_: Any) -> int:
        for result in results:
            return result
        raise error

    def record_graph(call: Callable[[], Any], _: torch.device) -> tuple[Callable[[], Any], str]:
        return call, "recorded"

    monkeypatch.setattr(torch, "compile", lambda *_, **__: run)
    monkeypatch.setattr(compiling, "record_graph", record_graph)
    graphs = Graphs(lambda: "as it is", "target tiny", torch.device(device), "eager", must=True)
    return lambda: graphs(1)


@pytest.mark.parametrize("good_calls", [0, 1, 2])
def test_launch_errors_of_the_first_calls_on_cuda_are_explained(
    good_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton and CUDA raise their errors when a kernel is first launched or replayed."""
    function = failing_call(monkeypatch, TypeError("OutOfResources"), "cuda", good_calls)
    if good_calls == 2:
        assert function() == "recorded"
    with pytest.raises(UserError, match=r"target tiny cannot be compiled .*OutOfResources.*eval\.compile=false"):
        function()


def test_errors_of_dynamo_are_explained_at_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    function = failing_call(monkeypatch, Unsupported("new shape"), "cpu", 5)
    for _ in range(5):
        function()
    with pytest.raises(UserError, match="cannot be compiled on this machine"):
        function()


def test_failed_recording_runs_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    function = failing_call(monkeypatch, RuntimeError(), "cuda", 4)
    monkeypatch.setattr(compiling, "record_graph", lambda *_: (_ for _ in ()).throw(RuntimeError("not permitted")))
    assert [function() for _ in range(3)] == [1, 2, 3]
    assert caplog.messages == [
        "target tiny cannot be recorded as a CUDA graph (RuntimeError: not permitted); running without one"
    ]
