"""The train stage: learns, resumes bit for bit, leaves the target unchanged, and reports mistakes in one sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_runs import SMALL_VOCABULARY, make_recipe

from draftsmith.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.train.drafter import stage
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.trainer import DrafterTrainer
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.processes.launch import errors_in_sentences


def test_training_learns_and_writes_its_files(target_folder: Path) -> None:
    recipe = make_recipe(target_folder, "learns", max_steps=30, logging_steps=7)
    report = train_drafter(recipe)
    folder = RunFolder(recipe).drafter
    history = json.loads((folder / "training.json").read_text())["history"]
    losses = [entry["loss_depth1"] for entry in history if "loss_depth1" in entry]
    assert len(losses) == 5  # steps 7, 14, 21, 28 and the last
    assert losses[-1] < 0.5 * losses[0]
    assert all(f"{what}_depth{depth}" in history[0] for what in ("loss", "accuracy") for depth in (1, 2, 3))
    assert report.steps == 30
    assert len(report.depth_accuracy) == 3
    assert "30 steps" in report.sentence()
    assert {"config.json", "model.safetensors", "training.json", "settings.json", "README.md"} <= {
        p.name for p in folder.iterdir()
    }
    modes = {path: path.stat().st_mode for path in folder.rglob("*") if path.is_file()}
    assert len(set(modes.values())) == 1, modes
    assert not any(SMALL_VOCABULARY in tensor.shape for tensor in load_file(folder / "model.safetensors").values())


def test_finished_drafter_is_not_trained_again(target_folder: Path) -> None:
    recipe = make_recipe(target_folder, "again")
    train_drafter(recipe)
    before = (RunFolder(recipe).drafter / "model.safetensors").stat().st_mtime_ns
    report = train_drafter(recipe)
    assert report.was_finished
    assert "nothing to do" in report.sentence()
    assert (RunFolder(recipe).drafter / "model.safetensors").stat().st_mtime_ns == before
    changed = recipe.model_copy(update={"train": {**recipe.train, "learning_rate": 2e-2}})
    with pytest.raises(UserError, match=r"started with train.learning_rate = 0.01, now it is 0.02: restore the key"):
        train_drafter(changed)


def test_changed_target_is_refused(target_folder: Path) -> None:
    recipe = make_recipe(target_folder, "target")
    train_drafter(recipe)
    weights = {name: 2 * value for name, value in load_file(target_folder / "model.safetensors").items()}
    save_file(weights, target_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"started with the target's weights \(hash\) = '\w+', now it is '\w+': restore"
    ):
        train_drafter(recipe)


def test_full_disk_starts_no_training(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards an option may change, as nothing was trained with the old one."""
    recipe = make_recipe(target_folder, "full", max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "free_bytes_at", lambda _: 0)
        with pytest.raises(UserError, match="but only 0 B are free on that disk"):
            train_drafter(recipe)
    assert not (RunFolder(recipe).drafter / "settings.json").exists()
    recipe.train["learning_rate"] = 2e-2
    assert train_drafter(recipe).steps == 1


class NotFinite(DrafterTrainer):
    """The loss of the fourth step is NaN."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 3:
            with torch.no_grad():
                next(self._drafter.parameters()).mul_(torch.nan)
        return super().compute_loss(*args, **kwargs)


def test_non_finite_loss_stops_training(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(target_folder, "not-finite", gradient_accumulation_steps=2, per_device_train_batch_size=2)
    monkeypatch.setattr(stage, "DrafterTrainer", NotFinite)
    stopped = r"not finite in step 4 \(the gradient's norm is nan\), and the step was not saved"
    with pytest.raises(UserError, match=stopped):
        train_drafter(recipe)
    checkpoints = RunFolder(recipe).drafter / "checkpoints"
    assert [file.name for file in checkpoints.iterdir()] == ["checkpoint-2"]


class OutOfMemory(DrafterTrainer):
    """Trainer that really allocates a pebibyte in the third step."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            torch.empty(1 << 50, dtype=torch.uint8)
        return super().compute_loss(*args, **kwargs)


def test_out_of_memory_is_one_sentence(target_folder: Path) -> None:
    """Its advice is accepted, and trains steps of as many rows."""
    recipe = make_recipe(target_folder, "large", global_batch_size=4, per_device_train_batch_size=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "DrafterTrainer", OutOfMemory)
        with pytest.raises(
            UserError,
            match=r"^out of memory \(.+\): lower train\.per_device_train_batch_size \(train\.global_batch_size keeps "
            r"the rows of a step\), and delete the run's folder `drafter` or use another `name`; ",
        ):
            train_drafter(recipe)
    recipe.train["per_device_train_batch_size"] = 2
    shutil.rmtree(RunFolder(recipe).drafter)
    assert train_drafter(recipe).steps == 6
    assert json.loads((RunFolder(recipe).drafter / "training.json").read_text())["batch_size"] == 4
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), MemoryError()):
        with pytest.raises(UserError, match="out of memory"), errors_in_sentences():
            raise error
    with pytest.raises(RuntimeError, match="in the middle"), errors_in_sentences():
        raise RuntimeError("in the middle of a step")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1e-3}, "unknown key `train.learning_rat`: did you mean `learning_rate`"),
        ({"zzz": 1}, "valid keys are those of transformers.TrainingArguments"),
        ({"learning_rate": "fast"}, "key `train.learning_rate`: input should be a valid number.*not 'fast'"),
        ({"num_train_epochs": [1]}, "key `train.num_train_epochs`"),
        ({"learning_rate": float("nan")}, "key `train.learning_rate`: input should be a finite number"),
        ({"lr_scheduler_type": "cosin"}, "train"),
        ({"remove_unused_columns": True}, "cannot be true"),
        (
            {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2},
            "`train.train_sampling_strategy`: batch_rebalance trains on some rows twice: use group_by_length",
        ),
        ({"global_batch_size": 4, "per_device_train_batch_size": 8}, "from 1 to 4, which is train.global_batch_size"),
        ({"global_batch_size": "many"}, "key `train.global_batch_size`: input should be a valid integer"),
        ({"global_batch_size": 8, "gradient_accumulation_steps": 2}, "leave it out: train.global_batch_size decides"),
        ({"optimizer": "muonn"}, "key `train.optimizer`: input should be 'adamw' or 'muon', not 'muonn'"),
        ({"report_to": "wandbb"}, r"key `train.report_to`: wandbb is not supported, only .* wandb,"),
        ({"muon_learning_rate": 0.1}, "muon_learning_rate is read with optimizer=muon only"),
        ({"optimizer": "muon", "muon_learning_rate": 0.0}, "muon_learning_rate must be above 0"),
        ({"average_tokens_across_devices": False}, "`train.average_tokens_across_devices` cannot be false, as a"),
        ({"gradient_checkpointing": True}, "`train.gradient_checkpointing`: drafters do not support it: leave it out"),
        ({"push_to_hub": True}, "`train.push_to_hub`: leave it out; `draftsmith push RECIPE` publishes the trained"),
    ],
)
def test_invalid_train_keys_are_reported(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        training_arguments(values, tmp_path, seed=0, use_cpu=True)


@pytest.mark.parametrize(
    ("processes", "most", "expected"),
    [(1, None, (32, 1)), (1, 4, (4, 8)), (8, 4, (4, 1)), (16, 4, (2, 1)), (1, 5, (4, 8)), (4, 3, (2, 4))],
)
def test_global_batch_is_independent_of_the_launch(
    tmp_path: Path, processes: int, most: int | None, expected: tuple[int, int]
) -> None:
    values = {"global_batch_size": 32, "save_strategy": False} | ({"per_device_train_batch_size": most} if most else {})
    args = training_arguments(values, tmp_path, seed=0, use_cpu=True, processes=processes)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == expected
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * processes == 32
    assert args.save_strategy == "no"  # which YAML reads as false
    with pytest.raises(UserError, match="30 rows cannot be shared evenly by 16 processes"):
        training_arguments({"global_batch_size": 30}, tmp_path, seed=0, use_cpu=True, processes=16)
