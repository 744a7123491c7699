"""Models load completely or not at all, and weights that differ from training's are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_drafter_of, tiny_target

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.weights import weights_sha256


def test_incomplete_drafters_are_refused(tmp_path: Path) -> None:
    target, file = tiny_target(), tmp_path / "model.safetensors"
    tiny_drafter_of("parallel", target).save_pretrained(tmp_path)
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
