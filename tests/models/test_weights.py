"""Models load completely or not at all, and weights that differ from training's are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_drafter_of, tiny_target

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.weights import weights_sha256

Weights = dict[str, torch.Tensor]


def drop_one(weights: Weights, name: str) -> None:
    del weights[name]


def add_one(weights: Weights, name: str) -> None:
    weights["made.up"] = torch.zeros(2)


def reshape_one(weights: Weights, name: str) -> None:
    weights[name] = weights[name][..., :-1].contiguous()


CHANGES = [
    (drop_one, "{name} missing"),
    (add_one, "made.up not of this architecture"),
    (reshape_one, "{name} of another shape"),
]


def change(folder: Path, how: Callable[[Weights, str], None], name: str) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    how(weights, name)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(("how", "message"), CHANGES)
def test_incomplete_drafters_are_refused(tmp_path: Path, how: Any, message: str) -> None:
    target = tiny_target()
    tiny_drafter_of("parallel", target).save_pretrained(tmp_path)
    name = sorted(load_file(tmp_path / "model.safetensors"))[0]
    load_drafter(tmp_path, target)
    change(tmp_path, how, name)
    with pytest.raises(UserError, match=message.format(name=name)):
        load_drafter(tmp_path, target)


def test_weights_of_another_training_are_refused(tmp_path: Path) -> None:
    """They are complete, with the right kind and shapes, but not those of `training.json`."""
    target = tiny_target()
    drafter = tiny_drafter_of("parallel", target)
    drafter.save_pretrained(tmp_path)
    training = {"steps": 1, "history": [], "weights_sha256": weights_sha256(tmp_path)}
    (tmp_path / "training.json").write_text(json.dumps(training))
    load_drafter(tmp_path, target)
    with torch.no_grad():
        drafter.norm.weight += 1
    drafter.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not those that training wrote"):
        load_drafter(tmp_path, target)
