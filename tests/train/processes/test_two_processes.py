"""Two gloo processes under DDP, as `accelerate launch` starts them with `recipes/accelerate/cpu_x2.yaml`."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.feature_server import feature_server
from support.launched_training import CPU_X2, NOT_LEFT, launch
from support.tiny_runs import LENGTHS, tiny_run, weights_of

from draftsmith.models.target.loading import load_target
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.stage import train_drafter

pytestmark = pytest.mark.slow
STEPS = 30
CURVE = {"global_batch_size": 6, "max_steps": STEPS, "logging_steps": 1, "save_steps": STEPS, "learning_rate": 1e-3}


def record(recipe: Recipe) -> dict[str, Any]:
    return json.loads((RunFolder(recipe).drafter / "training.json").read_text())


def losses(recipe: Recipe) -> list[float]:
    return [log["loss"] for log in record(recipe)["history"] if "loss" in log]


def launched(recipe: Recipe) -> Recipe:
    result = launch(CPU_X2, recipe)
    assert result.returncode == 0, result.stderr[-3000:]
    return recipe


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Train the same recipe in one process, with as many rows per step."""
    recipe = tiny_run(tmp_path_factory.mktemp("alone"), train=CURVE)
    train_drafter(recipe)
    return recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Train in two processes of a launch, once for all tests."""
    return launched(tiny_run(tmp_path_factory.mktemp("trained"), "whole", train=CURVE))


def test_two_processes_train_as_one(alone: Recipe, trained: Recipe) -> None:
    """Equal loss curves and weights; the final weight file is complete."""
    recipe = trained
    assert record(recipe)["batch_size"] == record(alone)["batch_size"] == 6
    assert record(recipe)["tokens"] == record(alone)["tokens"]
    assert len(losses(recipe)) == STEPS
    assert losses(recipe) == pytest.approx(losses(alone), abs=1e-5)
    assert losses(alone)[-1] < 0.9 * losses(alone)[0]
    for key, value in weights_of(alone).items():
        torch.testing.assert_close(weights_of(recipe)[key], value, atol=1e-5, rtol=0)
    config = json.loads((RunFolder(recipe).drafter / "config.json").read_text())
    assert config["architectures"] == ["ParallelDrafter"]


@pytest.mark.parametrize(
    ("number", "checkpoint"), [("SIGKILL", 4), pytest.param("SIGTERM", 5, marks=pytest.mark.nightly)]
)
def test_resumed_training_is_bitwise_equal(trained: Recipe, tmp_path: Path, number: str, checkpoint: int) -> None:
    """SIGTERM of one process saves in all of them; SIGKILL of one makes the other report it in one sentence."""
    broken = tiny_run(tmp_path, "broken", train={**CURVE, "save_steps": 2})
    result = launch(CPU_X2, broken, signals={1: (5, number)})
    assert result.returncode != 0
    checkpoints = RunFolder(broken).drafter / "checkpoints"
    assert not (RunFolder(broken).drafter / "training.json").exists()
    assert max(int(path.name.rpartition("-")[2]) for path in checkpoints.glob("checkpoint-*")) == checkpoint
    assert "[rank0]" not in result.stderr  # of the traceback
    assert NOT_LEFT not in result.stderr
    if number == signal.SIGKILL.name:
        assert "another process of this training has ended" in result.stderr
    resumed = launch(CPU_X2, broken)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert f"resuming from {checkpoints / f'checkpoint-{checkpoint}'}" in resumed.stdout
    found, expected = weights_of(broken), weights_of(trained)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_two_processes_ask_a_server_for_their_rows(tmp_path: Path) -> None:
    """Each row is asked for once, by one of them, and kept by both; the result is that of one process."""
    train = {"global_batch_size": 4, "max_steps": 6, "logging_steps": 1, "learning_rate": 1e-3}
    workers = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None}
    online = tiny_run(tmp_path, "online", train=train)
    train_drafter(online)
    (tmp_path / "served").mkdir()
    with feature_server(load_target(online.target)[0], (1, 3, 4), tmp_path / "served") as server:
        servers = {"urls": [server.url], "folder": str(tmp_path / "served"), "keep": True, "timeout_s": 60.0}
        features = {"source": "server", "dtype": "float32", "server": servers}
        recipe = tiny_run(tmp_path, "both", data={"features": features}, train={**train, **workers})
        launched(recipe)
        assert server.requests == 2 + len(LENGTHS)
    assert losses(recipe) == pytest.approx(losses(online), abs=1e-5)
    for key, value in weights_of(online).items():
        torch.testing.assert_close(weights_of(recipe)[key], value, atol=1e-5, rtol=0)
    assert len(list(RunFolder(recipe).features.glob("rows-*/*.safetensors"))) == len(LENGTHS)


@pytest.mark.nightly
def test_muon_in_two_processes_equals_one(tmp_path: Path) -> None:
    """Its products are in bf16, which enlarges rounding."""
    muon = {**CURVE, "optimizer": "muon", "muon_learning_rate": 2e-2}
    alone = tiny_run(tmp_path, "alone", train=muon)
    train_drafter(alone)
    recipe = launched(tiny_run(tmp_path, "both", train=muon))
    assert losses(recipe) == pytest.approx(losses(alone), rel=2e-3)
    assert losses(alone)[-1] < 0.9 * losses(alone)[0]
