"""Training stopped anywhere, or with a damaged newest checkpoint, resumes to bitwise equal results."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support.tiny_runs import (
    InterruptAt,
    have_equal_weights,
    history_of,
    make_recipe,
    save_small_target,
    train_until,
)
from transformers import TrainerCallback

from draftsmith.errors import Terminated, UserError
from draftsmith.recipes.run_folder import RunFolder, check_no_training_reads
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.stage import train_drafter

STEPS = 7
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"draft_vocab_size": 12, "markov_rank": 5, "depth_weights": 0.5},
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_target(tmp_path_factory.mktemp("resume") / "target")


def build_recipe(target: Path, name: str, options: dict[str, Any]) -> Recipe:
    recipe = make_recipe(target, name, max_steps=STEPS)
    recipe.drafter.options |= options
    return recipe


@pytest.fixture(scope="module")
def whole(target: Path) -> list[Recipe]:
    """Train without interruption, once for each of OPTIONS."""
    recipes = [build_recipe(target, f"whole{number}", options) for number, options in enumerate(OPTIONS)]
    for recipe in recipes:
        train_drafter(recipe)
    return recipes


@pytest.fixture
def broken(target: Path, request: pytest.FixtureRequest) -> Recipe:
    return build_recipe(target, request.node.name.replace("[", "-").replace("]", ""), {})


def check_equal_runs(whole: Recipe, broken: Recipe) -> None:
    """Check that weights are bitwise equal, and tokens and logs equal except for times."""
    assert have_equal_weights(whole, broken)
    metrics = [json.loads((RunFolder(recipe).drafter / "training.json").read_text()) for recipe in (whole, broken)]
    assert metrics[0]["steps"] == metrics[1]["steps"] == STEPS
    assert metrics[0]["tokens"] == metrics[1]["tokens"] > STEPS * 3 * 12  # rows of 12 to 14 tokens, 3 a step
    logs = [
        [
            {key: value for key, value in entry.items() if "_depth" in key or key == "loss"}
            for entry in history_of(recipe)
        ]
        for recipe in (whole, broken)
    ]
    assert [entry for entry in logs[0] if entry] == [entry for entry in logs[1] if entry]


class SignalIn(TrainerCallback):
    def __init__(self, step: int, number: signal.Signals) -> None:
        self._step, self._number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step - 1:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize(
    ("case", "step", "number", "error"),
    [(0, STEPS, signal.SIGTERM, Terminated), (1, 3, signal.SIGINT, KeyboardInterrupt)],
)
def test_ctrl_c_in_any_step(
    whole: list[Recipe],
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: int,
    step: int,
    number: signal.Signals,
    error: type[BaseException],
) -> None:
    """The current step is saved, also the last one, so no step is trained twice. SIGTERM does the same."""
    broken, handler = build_recipe(target, f"ctrl-c-{case}-{step}", OPTIONS[case]), signal.getsignal(number)
    assert type(train_until(SignalIn(step, number), broken, monkeypatch)) is error
    assert signal.getsignal(number) is handler
    assert (RunFolder(broken).drafter / "checkpoints" / f"checkpoint-{step}").is_dir()
    if not (RunFolder(broken).drafter / "training.json").is_file():  # it exists after the last step
        with pytest.raises(UserError, match="unfinished training on the token"):  # `distill` would remove its rows
            check_no_training_reads(RunFolder(broken).data)
    assert train_drafter(broken).steps == STEPS
    check_no_training_reads(RunFolder(broken).data)
    check_equal_runs(whole[case], broken)


def test_damaged_checkpoint_is_skipped(
    whole: list[Recipe], broken: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The previous one is used, with a warning. The Trainer itself would continue with a new optimiser."""
    train_until(InterruptAt(5), broken, monkeypatch)
    checkpoints = RunFolder(broken).drafter / "checkpoints"
    (checkpoints / "checkpoint-4" / "optimizer.pt").unlink()
    train_drafter(broken)
    said = capsys.readouterr().out
    assert "checkpoint-4 is damaged (optimizer.pt is missing or incomplete): set aside as damaged-checkpoint-4" in said
    assert f"resuming from {checkpoints / 'checkpoint-2'}\n" in said
    check_equal_runs(whole[0], broken)


@pytest.mark.nightly
def test_training_is_deterministic_with_several_threads(target_folder: Path) -> None:
    """The backward of indexing sums in parallel for large inputs: here 32 rows of 64 tokens and two masks."""
    trained = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for name in ("first", "second"):
            recipe = make_recipe(target_folder, name, per_device_train_batch_size=32, max_steps=3)
            generator = torch.Generator().manual_seed(0)
            rows = [
                {"input_ids": torch.randint(3, 40, (64,), generator=generator).tolist(), "loss_mask": [1] * 64}
                for _ in range(96)
            ]
            datasets.Dataset.from_list(rows).save_to_disk(str(RunFolder(recipe).data / "tokens"))
            train_drafter(recipe)
            trained.append(recipe)
    finally:
        torch.set_num_threads(threads)
    assert have_equal_weights(*trained)
    said = json.loads((RunFolder(recipe).drafter / "training.json").read_text())["reproducible"]
    assert "2 threads" in said
