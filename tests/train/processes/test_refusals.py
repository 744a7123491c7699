"""The launch is detected from the environment; impossible combinations are refused before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import recipe_in
from transformers import TrainingArguments

from draftsmith.errors import UserError
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.processes import launch as launches
from draftsmith.train.processes.launch import Launch, check_launch, detect_launch

DDP, FSDP2, ZERO2, ZERO3 = Launch("ddp", 2), Launch("fsdp", 2, 2), Launch("zero", 2, 2), Launch("zero", 2, 3)
ALONE = Launch("single")


def make_arguments(tmp_path: Path, **train: Any) -> TrainingArguments:
    return training_arguments(train, tmp_path, seed=0, use_cpu=True)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ALONE),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, Launch("fsdp", 1, 2)),
        ({"ACCELERATE_USE_FSDP": "true"}, Launch("fsdp", 1, 1)),
        ({"ACCELERATE_USE_FSDP": "false"}, ALONE),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, Launch("zero", 1, 2)),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, Launch("zero", 1, 3)),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"}, Launch("zero", 1, 2)),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, Launch("megatron", 1)),
    ],
)
def test_detect_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: Launch
) -> None:
    args = make_arguments(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert detect_launch(args) == expected


@pytest.mark.parametrize(
    ("launch", "kind", "data", "train", "message"),
    [
        (Launch("megatron", 2), "parallel", {}, {}, "Megatron-LM, which has no drafters: launch with"),
        (Launch("fsdp", 2, 1), "parallel", {}, {}, "FSDP version 1, .* set fsdp_version: 2"),
        (Launch("fsdp", 1, 2), "parallel", {}, {}, "FSDP splits weights among processes and there is one"),
        (FSDP2, "parallel", {}, {"save_only_model": True}, r"`train\.save_only_model`: with FSDP2 a checkpoint"),
        (ZERO2, "parallel", {}, {"optimizer": "muon"}, r"`train\.optimizer`: ZeRO-2 flattens weights, and Muon needs"),
        (FSDP2, "medusa2", {}, {}, "`medusa2` cannot be trained with FSDP2, as its LoRA is inside the target"),
        (ZERO3, "medusa2", {}, {}, "`medusa2` cannot be trained with ZeRO-3, as its LoRA is inside the target"),
    ],
)  # fmt: skip
def test_impossible_combinations_are_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch: Launch,
    kind: str,
    data: dict[str, Any],
    train: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(launches.importlib.util, "find_spec", lambda name: name)  # independent of what is installed
    recipe = recipe_in(tmp_path, drafter={"kind": kind, "options": {}}, data=data)
    with pytest.raises(UserError, match=message):
        check_launch(recipe, make_arguments(tmp_path, **train), launch)
