"""Attention of few rows, split over the keys: by Triton's interpreter on a CPU, and on a GPU if available."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.places import ROOT
from support.split_attention import CASES, differences
from support.vllm_answers import TRITON, has_triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.models.kernels import attention, cuda_attention
from draftsmith.models.kernels.attention import OWN_SDPA, use_own_attention
from draftsmith.models.kernels.cuda_attention import (
    can_split,
    has_split_attention,
)

NUM_RESULTS = len(CASES) + 2  # cases of one row also run without a mask


@pytest.mark.vllm
@pytest.mark.skipif(not has_triton(), reason="Triton is not installed: make vllm-env")
def test_equals_torchs_attention_in_the_interpreter() -> None:
    """Only in fp32: Triton 3.9's interpreter has no bf16 products."""
    path = os.pathsep.join([str(ROOT / "tests"), str(TRITON), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "support.split_attention", "cpu"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    results = json.loads(printed)
    assert len(results) == NUM_RESULTS
    assert max(results) < 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_torchs_attention_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    assert has_split_attention(torch.device("cuda"), dtype)
    results = differences(torch.device("cuda"), dtype)
    assert len(results) == NUM_RESULTS
    assert max(results) < tolerance


def sample(rows: int = 5, kv_heads: int = 3, head_size: int = 64) -> dict[str, Any]:
    key = torch.zeros(1, kv_heads, 40, head_size)
    mask = torch.zeros(1, 1, rows, 40)
    return {"query": torch.zeros(1, 9, rows, head_size), "key": key, "value": key, "mask": mask}


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        (lambda given: given, True),
        (lambda given: {**given, **sample(rows=64)}, True),
        (lambda given: {**given, **sample(rows=65)}, False),
        (lambda given: {**given, "mask": None}, False),
        (lambda given: {**sample(rows=1), "mask": None}, True),
        (lambda given: {**given, "mask": given["mask"] == 0}, False),
        (lambda given: {**given, "mask": given["mask"][..., :30]}, False),
        (lambda given: {**given, **sample(kv_heads=2)}, False),
        (lambda given: {**given, **sample(head_size=8)}, False),
        (lambda given: {**given, "value": given["value"][..., :32]}, False),
        (lambda given: {**given, "key": given["key"].half()}, False),
        (lambda given: {**given, "query": given["query"].expand(2, -1, -1, -1)}, False),
    ],
)
def test_kernel_takes_few_rows_of_one_sequence(
    change: Callable[[dict[str, Tensor]], dict[str, Any]], is_taken: bool
) -> None:
    given = change(sample())
    with torch.no_grad():
        assert can_split(**given) is is_taken
    assert not can_split(**given)  # the kernel has no backward


@pytest.fixture
def check_again() -> Iterator[None]:
    has_split_attention.cache_clear()
    yield
    has_split_attention.cache_clear()


@pytest.mark.usefixtures("check_again")
@pytest.mark.parametrize(
    ("error", "reason"),
    [(0.5, "a result differs from torch's by 0.5"), (None, "RuntimeError: no C compiler"), (0.0, None)],
)
def test_kernels_that_fail_or_differ_are_not_used(
    error: float | None, reason: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are checked once per process."""
    calls: list[Tensor] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        calls.append(query)
        if error is None:
            raise RuntimeError("no C compiler\nand a long trace")
        seen = scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
        return seen.transpose(1, 2) + error

    monkeypatch.setattr(cuda_attention.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(cuda_attention, "split_attention", attention)
    assert has_split_attention(torch.device("cpu"), torch.float32) == (reason is None)
    assert reason is None or f"is not used on cpu ({reason})" in caplog.text
    checks = len(calls)
    has_split_attention(torch.device("cpu"), torch.float32)
    assert len(calls) == checks


@pytest.mark.parametrize(
    ("device", "implementation", "works", "is_replaced"),
    [
        ("cuda", "sdpa", True, True),
        ("cuda", "sdpa", False, False),
        ("cuda", "eager", True, False),
        ("cpu", "sdpa", False, True),
        ("mps", "sdpa", True, False),
    ],
)
def test_sdpa_is_replaced(
    device: str, implementation: str, works: bool, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_split_attention", lambda *_: works)
    chosen: list[str] = []
    config = SimpleNamespace(_attn_implementation=implementation)
    config.get_text_config = lambda: config
    model: Any = SimpleNamespace(
        config=config, device=torch.device(device), dtype=torch.bfloat16, set_attn_implementation=chosen.append
    )
    use_own_attention(model)
    assert chosen == [OWN_SDPA] * is_replaced
