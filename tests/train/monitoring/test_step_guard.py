"""What is not finite stops the training before the step is taken; spikes are logged; the rows are written down."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import in_processes
from support.tiny_runs import make_recipe
from transformers import TrainerState

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.batches.collate import collate_right_padded
from draftsmith.train.batches.packing import PackedRows
from draftsmith.train.drafter import stage
from draftsmith.train.drafter.checkpoints import newest_whole_checkpoint
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.trainer import SUSPECT_BATCHES, DrafterTrainer
from draftsmith.train.monitoring.step_guard import StepGuard
from draftsmith.train.monitoring.suspect_batch import SuspectBatch

STEP = 4


class NotFinite(DrafterTrainer):
    """The loss of one step is NaN, in the last process."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step + 1 == STEP and self.args.process_index == self.args.world_size - 1:
            with torch.no_grad():
                next(self._drafter.parameters()).mul_(torch.nan)
        return super().compute_loss(*args, **kwargs)


class InfiniteGradient(DrafterTrainer):
    """The loss is finite, its gradient is not."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step + 1 == STEP:
            next(p for p in self._drafter.parameters() if p.grad is not None).grad.mul_(torch.inf)
        return loss


def suspects(recipe: Recipe) -> Path:
    return RunFolder(recipe).drafter / "checkpoints" / SUSPECT_BATCHES


@pytest.mark.parametrize(
    ("trainer", "what"), [(NotFinite, "the loss is nan"), (InfiniteGradient, "the gradient's norm is (nan|inf)")]
)
def test_not_finite_ends_the_training(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch, trainer: type[DrafterTrainer], what: str
) -> None:
    recipe = make_recipe(target_folder, "not-finite", gradient_accumulation_steps=2, per_device_train_batch_size=2)
    monkeypatch.setattr(stage, "DrafterTrainer", trainer)
    with pytest.raises(UserError, match=rf"{what} in step {STEP}, which was not taken: .*step-{STEP}-rank-0\.json"):
        train_drafter(recipe)
    written = json.loads((suspects(recipe) / f"step-{STEP}-rank-0.json").read_text())
    assert [len(batch["rows"]) for batch in written["micro_batches"]] == [2, 2]
    tokens = stage.load_tokens(RunFolder(recipe), recipe.name)
    for batch in written["micro_batches"]:
        for row in batch["rows"]:
            assert row["input_ids"] == tokens[row["row"]]["input_ids"]
            assert row["loss_mask"] == tokens[row["row"]]["loss_mask"]
    checkpoints = RunFolder(recipe).drafter / "checkpoints"
    assert newest_whole_checkpoint(checkpoints) == checkpoints / "checkpoint-2"


def fail_in_one_process(recipe: Recipe) -> None:
    stage.DrafterTrainer = NotFinite  # type: ignore[misc]
    with pytest.raises(UserError, match=f"the loss is nan in step {STEP}"):
        train_drafter(recipe)


def test_all_processes_stop_together(target_folder: Path) -> None:
    """One of them has NaN; none waits for another."""
    recipe = make_recipe(target_folder, "together", per_device_train_batch_size=2)
    in_processes(fail_in_one_process, 2, recipe)
    assert {file.name for file in suspects(recipe).iterdir()} == {f"step-{STEP}-rank-{rank}.json" for rank in (0, 1)}


def guard_after(losses: list[float], folder: Path, dataset: Any = ()) -> tuple[StepGuard, list[dict[str, float]]]:
    logs: list[dict[str, float]] = []
    guard = StepGuard(folder, dataset, lambda tensor: tensor, logs.append)
    args = SimpleNamespace(fp16=False, process_index=0)
    for step, loss in enumerate(losses):
        guard.begin([collate_right_padded([{"input_ids": [step, 7], "loss_mask": [0, 1]}])])
        guard.add_loss(torch.tensor(loss))
        guard.set_gradient_norm(torch.tensor(1.5))
        guard.on_pre_optimizer_step(args, TrainerState(global_step=step), None)
    return guard, logs


def test_a_spike_is_logged_and_moves_nothing(tmp_path: Path) -> None:
    """Losses of 2.0 and 2.1 in turn: median 2.05, spread 1.4826 * 0.05, so that above 2.05 + 8 * 0.0741 is a spike."""
    usual = [2.0, 2.1] * 15
    guard, logs = guard_after([*usual, 2.6, 2.0, 2.7, 2.0], tmp_path, [{"input_ids": [32, 7]}])
    assert logs == [{"loss_spike": pytest.approx(2.7), "loss_usual": 2.05, "gradient_norm_at_spike": 1.5}]
    (file,) = tmp_path.iterdir()
    assert file.name == "step-33-rank-0.json"
    (batch,) = json.loads(file.read_text())["micro_batches"]
    assert batch["rows"] == [{"row": 0, "input_ids": [32, 7], "loss_mask": [0, 1]}]
    assert guard.state()["attributes"]["spikes"] == 1
    assert len(guard.recent_losses) == 34


def test_what_falls_or_is_young_is_no_spike(tmp_path: Path) -> None:
    falling = [5.0 * 0.97**step for step in range(200)]
    assert guard_after(falling, tmp_path)[1] == []
    assert guard_after([2.0] * 10 + [40.0], tmp_path)[1] == []  # a median of ten says little


def test_a_run_that_goes_on_knows_the_recent_losses(target_folder: Path) -> None:
    recipe = make_recipe(target_folder, "recent", max_steps=6)
    train_drafter(recipe)
    checkpoints = RunFolder(recipe).drafter / "checkpoints"
    for step in (2, 4, 6):
        state = json.loads((checkpoints / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert len(state["stateful_callbacks"]["StepGuard"]["attributes"]["recent_losses"]) == step


def test_packed_rows_are_taken_apart(tmp_path: Path) -> None:
    import datasets

    rows = [{"input_ids": [9 + n, *range(n)], "loss_mask": [0] + [1] * n, "length": n + 1} for n in (4, 2, 5, 3)]
    packed = PackedRows(datasets.Dataset.from_list(rows), 9)
    batch = collate_right_padded([packed[0], packed[1]])
    file = SuspectBatch(3, 1, [0.5], [batch]).write(tmp_path, packed)
    (written,) = json.loads(file.read_text())["micro_batches"]
    assert sorted(row["row"] for row in written["rows"]) == [0, 1, 2, 3]
    for row in written["rows"]:
        expected = rows[row["row"]]
        assert row["input_ids"] == expected["input_ids"]
        assert row["loss_mask"] == expected["loss_mask"]
