"""Launches that cannot work are refused before anything is loaded; what is left in the environment is ignored."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from draftsmith.errors import UserError
from draftsmith.recipes.run_folder import MPI_WORLD_SIZES, is_first_process
from draftsmith.train.drafter.checkpoints import MANIFEST, check_same_launch
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.processes import launch as launches


def make_arguments(tmp_path: Path, **train: Any) -> TrainingArguments:
    return training_arguments(train, tmp_path, seed=0, use_cpu=True)


@pytest.mark.parametrize("name", launches.SPLITTERS)
def test_split_models_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    key = launches.SPLITTERS[name]
    message = rf"does not support {key}, .*: leave train\.{key} out and launch with recipes/accelerate/multi_gpu\.yaml"
    with pytest.raises(UserError, match=message):
        make_arguments(tmp_path, **{key: True})
    monkeypatch.setenv(name, "false")
    make_arguments(tmp_path)
    monkeypatch.setenv(name, "true")
    with pytest.raises(UserError, match=message):
        make_arguments(tmp_path)


def test_checkpoints_of_another_launch_are_reported(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    for written, refusal in (("DDP", None), ("one process", None), ("FSDP2", "FSDP2, .*: delete .*/checkpoints to")):
        (checkpoint / MANIFEST).write_text(json.dumps({"launch": written, "processes": 2, "files": {}}))
        with nullcontext() if refusal is None else pytest.raises(UserError, match=f"was written under {refusal}"):
            check_same_launch(checkpoint, 2)


# ---- what other programs leave in the environment ----


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


def test_empty_variables_are_as_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("WORLD_SIZE", "LOCAL_RANK", "PMI_SIZE", "PARALLELISM_CONFIG_TP_SIZE", "ACCELERATE_USE_CPU")
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
