"""Errors of compiled functions."""

from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

from draftsmith.errors import UserError
from draftsmith.models.compiling import compiled


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, device: str, good_calls: int) -> Any:
    """Return a compiled function that raises this error after `good_calls` calls; nothing is compiled."""
    results = iter([torch.zeros(1)] * good_calls)

    def call(*_: Any) -> Any:
        for result in results:
            return result
        raise error

    monkeypatch.setattr(torch, "compile", lambda *_, **__: call)
    return compiled(lambda: None, torch.device(device), "target tiny", backend="eager")


@pytest.mark.parametrize("good_calls", [0, 1, 2])
def test_launch_errors_of_the_first_calls_on_cuda_are_explained(
    good_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's and CUDA's own errors come when a kernel is first launched, recorded or replayed."""
    function = failing(monkeypatch, RuntimeError("OutOfResources"), "cuda", good_calls)
    for _ in range(good_calls):
        function()
    with pytest.raises(UserError, match=r"target tiny cannot be compiled .*OutOfResources.*eval\.compile=false"):
        function()


@pytest.mark.parametrize(
    ("error", "device", "good_calls"),
    [
        (RuntimeError("later"), "cuda", 3),
        (RuntimeError("fail_on_recompile"), "cpu", 0),
        (torch.OutOfMemoryError("too large"), "cuda", 0),
    ],
)
def test_other_errors_pass_through(
    error: Exception, device: str, good_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = failing(monkeypatch, error, device, good_calls)
    for _ in range(good_calls):
        function()
    with pytest.raises(type(error), match=str(error)):
        function()


def test_errors_of_dynamo_are_explained_at_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    function = failing(monkeypatch, Unsupported("new shape"), "cpu", 5)
    for _ in range(5):
        function()
    with pytest.raises(UserError, match="cannot be compiled on this machine"):
        function()
