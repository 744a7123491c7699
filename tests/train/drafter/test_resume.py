"""Training that is stopped anywhere, or whose files are damaged, ends as one that was not: weights, counts, log."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import InterruptAt, make_recipe
from transformers import TrainerCallback

from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter import stage
from draftsmith.train.drafter.checkpoints import newest_whole_checkpoint
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.trainer import DrafterTrainer

STEPS = 7


@pytest.fixture
def recipes(target_folder: Path, request: pytest.FixtureRequest) -> tuple[Recipe, Recipe]:
    """One that is trained already without a break, and its like. A parameter: options of the drafter."""
    whole, broken = (make_recipe(target_folder, name, max_steps=STEPS) for name in ("whole", "broken"))
    for recipe in (whole, broken):
        recipe.drafter.options |= getattr(request, "param", {})
    train_drafter(whole)
    return whole, broken


def broken_off(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, callback: TrainerCallback) -> None:
    class Interrupted(DrafterTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[callback], **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "DrafterTrainer", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(recipe)


def check_alike(whole: Recipe, broken: Recipe) -> None:
    """Weights bit for bit; the same tokens, and the same log but for its times."""
    expected, found = (load_file(RunFolder(recipe).drafter / "model.safetensors") for recipe in (whole, broken))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    metrics = [json.loads((RunFolder(recipe).drafter / "training.json").read_text()) for recipe in (whole, broken)]
    assert metrics[0]["steps"] == metrics[1]["steps"] == STEPS
    assert metrics[0]["tokens"] == metrics[1]["tokens"] > STEPS * 3 * 12  # rows of 12 to 14 tokens, 3 a step
    logs = [
        [{key: value for key, value in entry.items() if "_depth" in key} for entry in each["history"]]
        for each in metrics
    ]
    assert [entry for entry in logs[0] if entry] == [entry for entry in logs[1] if entry]


class SignalIn(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step - 1:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("recipes", "step"),
    [({}, 3), ({}, STEPS), ({"draft_vocab_size": 12}, 5), ({"in_parts": True}, 4), ({"markov_rank": 5}, 4)],
    indirect=["recipes"],
)
def test_ctrl_c_in_any_step(recipes: tuple[Recipe, Recipe], monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """In the last one too: nothing is trained twice."""
    whole, broken = recipes
    broken_off(broken, monkeypatch, SignalIn(step))
    assert train_drafter(broken).steps == STEPS
    check_alike(whole, broken)


def test_killed_between_the_last_checkpoint_and_the_end(
    recipes: tuple[Recipe, Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = recipes

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_save", killed)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(broken)
    assert not (RunFolder(broken).drafter / "training.json").exists()
    train_drafter(broken)
    check_alike(whole, broken)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
def test_a_damaged_checkpoint_is_passed_over(
    recipes: tuple[Recipe, Recipe], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Truncated, as a full disk leaves it: the one before is taken, and the user is told."""
    whole, broken = recipes
    broken_off(broken, monkeypatch, InterruptAt(5))
    checkpoints = RunFolder(broken).drafter / "checkpoints"
    file = checkpoints / "checkpoint-4" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    train_drafter(broken)
    said = capsys.readouterr().out
    assert f"checkpoint-4 is damaged ({name}" in said
    assert "going on from" in said
    assert "checkpoint-2" in said
    assert (checkpoints / "damaged-checkpoint-4" / name).is_file()
    check_alike(whole, broken)


def test_a_missing_file_of_a_checkpoint(recipes: tuple[Recipe, Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer would go on with an optimiser that remembers nothing."""
    whole, broken = recipes
    broken_off(broken, monkeypatch, InterruptAt(5))
    (RunFolder(broken).drafter / "checkpoints" / "checkpoint-4" / "optimizer.pt").unlink()
    train_drafter(broken)
    check_alike(whole, broken)


def test_no_whole_checkpoint_at_all(recipes: tuple[Recipe, Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = recipes
    broken_off(broken, monkeypatch, InterruptAt(5))
    checkpoints = RunFolder(broken).drafter / "checkpoints"
    for folder in checkpoints.iterdir():
        (folder / "scheduler.pt").write_bytes(b"")
    assert newest_whole_checkpoint(checkpoints) is None
    train_drafter(broken)
    check_alike(whole, broken)


def test_the_same_bits_with_several_threads(target_folder: Path) -> None:
    """The backward of indexing adds up in parallel where there is much: here 32 rows of 64 tokens and two masks."""
    trained = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for name in ("first", "second"):
            recipe = make_recipe(target_folder, name, per_device_train_batch_size=32, max_steps=6)
            generator = torch.Generator().manual_seed(0)
            rows = [
                {"input_ids": torch.randint(3, 40, (64,), generator=generator).tolist(), "loss_mask": [1] * 64}
                for _ in range(96)
            ]
            tokens = Path(recipe.runs_dir) / name / "data" / "tokens"
            datasets.Dataset.from_list(rows).save_to_disk(str(tokens))
            train_drafter(recipe)
            trained.append((RunFolder(recipe).drafter / "model.safetensors").read_bytes())
    finally:
        torch.set_num_threads(threads)
    assert trained[0] == trained[1]
    said = json.loads((RunFolder(recipe).drafter / "training.json").read_text())["reproducible"]
    assert "2 threads" in said
