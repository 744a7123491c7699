"""Untrusted drafter folders: incomplete weights, and values that would exhaust memory or break trees, are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_target

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter, load_drafter_class, read_drafter


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(num_hidden_layers=4)


def save_drafter(folder: Path, target: Any, kind: str = "parallel", **options: Any) -> Path:
    load_drafter_class(kind).from_target(target, options).save_pretrained(folder)
    return folder


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("value", "dtype", "shown"),
    [(float(name), "auto", "float32") for name in ("nan", "inf", "-inf")] + [(1e6, torch.float16, "float16")],
)
def test_weights_that_are_not_finite_in_the_targets_dtype_are_refused(
    tmp_path: Path, target: Any, value: float, dtype: Any, shown: str
) -> None:
    folder = save_drafter(tmp_path, target, num_masks=2)
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[0]
    weights[name].view(-1)[-1] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if dtype != "auto":
        read_drafter(folder, torch.float32)
    with pytest.raises(UserError, match=rf"infinite or NaN \({name}; in torch.{shown}\)"):
        read_drafter(folder, dtype)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("parallel", {"num_masks": 10**9}),
        ("medusa", {"num_heads": 10**9}),
        ("eagle3", {"ttt_steps": 10**9}),
        ("dflash", {"block_size": 10**9}),
        ("dflash2", {"conv_kernel_size": 10**9}),
        ("draft_model", {"draft_depth": 10**9}),
    ],
)
def test_counts_that_would_exhaust_memory_are_refused(
    tmp_path: Path, target: Any, kind: str, values: dict[str, Any]
) -> None:
    folder = save_drafter(tmp_path, target, kind)
    change(folder, **values)
    with pytest.raises(UserError, match=next(iter(values))):
        read_drafter(folder, "auto")


def test_incomplete_drafters_are_refused(tmp_path: Path, target: Any) -> None:
    file = save_drafter(tmp_path, target) / "model.safetensors"
    whole = load_file(file)
    name = sorted(whole)[0]
    without = {other: value for other, value in whole.items() if other != name}
    for weights, message in (
        (without, f"{name} missing"),
        ({**whole, "made.up": torch.zeros(2)}, "made.up not of this architecture"),
        ({**whole, name: whole[name][..., :-1].contiguous()}, f"{name} of another shape"),
    ):
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            load_drafter(tmp_path, target)
