"""The launch is detected from the environment; impossible combinations are refused before anything is loaded."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import recipe_in
from transformers import TrainingArguments

from draftsmith.errors import UserError
from draftsmith.recipes.run_folder import MPI_WORLD_SIZES, is_first_process
from draftsmith.train.drafter.checkpoints import MANIFEST, check_same_launch
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.processes import launch as launches
from draftsmith.train.processes.launch import Launch, check_launch, detect_launch

ALONE, DDP, FSDP2 = Launch("one process"), Launch("DDP", 2), Launch("FSDP2", 2)


def make_arguments(tmp_path: Path, **train: Any) -> TrainingArguments:
    return training_arguments(train, tmp_path, seed=0, use_cpu=True)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ALONE),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, Launch("FSDP2")),
        ({"ACCELERATE_USE_FSDP": "true"}, Launch("FSDP1")),
        ({"ACCELERATE_USE_FSDP": "false"}, ALONE),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, Launch("Megatron-LM")),
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
        (Launch("Megatron-LM", 2), "parallel", {}, {}, "Megatron-LM, which cannot train drafters: launch with"),
        (Launch("FSDP1", 2), "parallel", {}, {}, "FSDP version 1, .* set fsdp_version: 2"),
        (Launch("FSDP2"), "parallel", {}, {}, "FSDP splits weights among processes and there is one"),
        (FSDP2, "parallel", {}, {"save_only_model": True}, r"`train\.save_only_model`: with FSDP2 a checkpoint"),
        (FSDP2, "medusa2", {}, {}, "`medusa2` cannot be trained with FSDP2, as its LoRA is inside the target"),
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
    recipe = recipe_in(tmp_path, drafter={"kind": kind, "options": {}}, data=data)
    with pytest.raises(UserError, match=message):
        check_launch(recipe, make_arguments(tmp_path, **train), launch)


@pytest.mark.parametrize(
    ("written", "advice"), [("DDP", "launch it as before, or delete"), ("ZeRO-2", "delete .*/checkpoints to train")]
)
def test_checkpoints_of_another_launch_are_reported(tmp_path: Path, written: str, advice: str) -> None:
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).write_text(json.dumps({"launch": written, "processes": 2, "files": {}}))
    with pytest.raises(UserError, match=f"was written under {written}, which FSDP2 cannot read: {advice}"):
        check_same_launch(checkpoint, FSDP2)


# ---- what other programs leave in the environment ----


@pytest.mark.parametrize("name", launches.SPLITS)
def test_split_sequences_and_layers_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    recipe, args = recipe_in(tmp_path), make_arguments(tmp_path)
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", "2")
    with pytest.raises(UserError, match=f"asks for {name.lower()}_size above 1: drafters are trained by DDP"):
        check_launch(recipe, args, DDP)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_MIXED_PRECISION", "fp16"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
    ],
)
def test_the_recipe_decides_in_place_of_accelerates_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    args = make_arguments(tmp_path)
    assert args.mixed_precision == "no"
    assert name not in os.environ
    assert f"{name}={value.lower()} is not used: train." in caplog.text
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    caplog.clear()
    assert make_arguments(tmp_path, bf16=True).mixed_precision == "bf16"
    assert not caplog.text  # the same as in the recipe


def test_ranks_count_in_a_launch_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for leftover in ({}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}):
        for name, value in {"RANK": "1", "LOCAL_RANK": "1", **leftover}.items():
            monkeypatch.setenv(name, value)
        assert is_first_process()
        assert make_arguments(tmp_path).process_index == 0
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_first_process()


PLACED = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        *(({name: "4"}, f"{name}=4 says .*: unset {name} to train") for name in ("WORLD_SIZE", *MPI_WORLD_SIZES)),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment is not a number from 1 on: unset WORLD_SIZE, or start"),
        ({"PMI_SIZE": "two"}, "PMI_SIZE=two in the environment is not a number"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "x", **PLACED}, "LOCAL_RANK=x in the environment is not a number from 0"),
        ({"WORLD_SIZE": "2", **PLACED}, "2 processes were launched, and LOCAL_RANK is not set: start them by"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed is not supported any more: .* with recipes/accelerate/fsdp2"),
    ],
)
def test_launches_that_cannot_work_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)  # as on a GPU, which LOCAL_RANK assigns
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        training_arguments({}, tmp_path, seed=0)


def test_recipes_for_deepspeed_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"DeepSpeed is not supported any more: leave train\.deepspeed out"):
        make_arguments(tmp_path, deepspeed="zero.json")


def test_empty_variables_are_as_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("WORLD_SIZE", "LOCAL_RANK", "PMI_SIZE", "PARALLELISM_CONFIG_TP_SIZE", "FSDP_VERSION", "ACCELERATE_USE_CPU")
    for name in names:
        monkeypatch.setenv(name, "")
    make_arguments(tmp_path)
    assert not set(names) & os.environ.keys()  # accelerate reads them too


WAITING = """
import sys
from pathlib import Path
from draftsmith.errors import exit_with_one_sentence
from draftsmith.train.drafter.training_arguments import training_arguments
with exit_with_one_sentence():
    training_arguments({}, Path(sys.argv[1]), 0, use_cpu=True)
"""


@pytest.mark.parametrize(("number", "code", "processes"), [(signal.SIGTERM, -15, 2), (signal.SIGINT, -2, 1)])
def test_signals_end_a_launch_that_waits(tmp_path: Path, number: int, code: int, processes: int) -> None:
    """A process that never comes, or a place that is not found, is said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = "127.0.0.1" if processes > 1 else "gone.invalid"
    launched = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": place, "MASTER_PORT": port}
    launched["WORLD_SIZE"] = str(processes)
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, **launched}, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = next(line for line in process.stderr if "waiting" in line)
            assert said == f"waiting for {processes} process(es) at {place}:{port}; Ctrl-C ends this one\n"
            process.send_signal(number)
            assert process.wait(timeout=30) == code
        finally:
            process.kill()
