"""Rows, random draws and weights do not depend on how processes and micro-batches share a step."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from support.processes import run_in_processes
from support.tiny_runs import make_recipe, recipe_in
from torch import Tensor

from draftsmith.models.groups.layout import active, depth_labels
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter import stage
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.trainer import DrafterTrainer
from draftsmith.train.drafter.training_arguments import DrafterTrainingArguments

# 13 rows in steps of 8: the second step has only 5, for four micro-batches of 2 or four processes.
LENGTHS = (12, 30, 7, 21, 9, 40, 15, 8, 26, 11, 33, 19, 10)
EPOCHS, EVAL_ROWS = 2, 3


def prepare_recipe(folder: Path, processes: int, drafter: dict[str, Any]) -> Recipe:
    """Write answers of 3 to 36 labels: the mean of micro-batch means is far from the mean over all labels."""
    recipe = recipe_in(
        folder,
        f"of{processes}",
        drafter=drafter,
        data={"eval_rows_frac": 0.25},
        train={
            "global_batch_size": 8, "per_device_train_batch_size": 2, "max_steps": -1,
            "num_train_epochs": EPOCHS, "learning_rate": 1e-3, "logging_steps": 1, "eval_strategy": "epoch",
            "save_strategy": "no", "per_device_eval_batch_size": 1, "train_sampling_strategy": "group_by_length",
        },
    )  # fmt: skip
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = [3 + (7 * number + place * (1 + number % 3)) % 30 for place in range(length)]
        rows.append({"input_ids": ids, "loss_mask": [0] * 4 + [1] * (length - 4), "length": length})
    datasets.Dataset.from_list(rows).save_to_disk(str(RunFolder(recipe).data / "tokens"))
    return recipe


def train_and_record(recipe: Recipe) -> None:
    """Train, and record the rows and random draws of this process."""
    seen: list[list[list[int]]] = []
    drawn: list[float] = []
    compute_loss = DrafterTrainer.compute_loss

    def recording_step(
        self: DrafterTrainer, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        loss = compute_loss(self, model, inputs, *args, **kwargs)
        rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
        seen.append([ids[mask].tolist() for ids, mask in rows if mask.any()])
        drawn.append(float(torch.rand((), generator=self._drafter.generator)))
        return loss

    DrafterTrainer.compute_loss = recording_step  # type: ignore[method-assign]
    try:
        train_drafter(recipe)
    finally:
        DrafterTrainer.compute_loss = compute_loss  # type: ignore[method-assign]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    note = RunFolder(recipe).root / f"seen{rank}.json"
    note.write_text(json.dumps({"rows": seen, "drawn": drawn}))


NOISY = {"kind": "eagle_parallel", "options": {"num_masks": 3, "keep_ratio": 0.7, "feature_noise": 0.1}}
MEDUSA = {"kind": "medusa", "options": {"num_heads": 3, "lm_heads": "shared"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "processes"),
    [
        (NOISY, 2),
        pytest.param(NOISY, 4, marks=pytest.mark.nightly),
        pytest.param(MEDUSA, 2, marks=pytest.mark.nightly),
    ],
)
def test_every_layout_trains_the_same_weights(target_folder: Path, drafter: dict[str, Any], processes: int) -> None:
    """Use real gloo processes, uneven last batches, shuffled rows, noise and dropped masks."""
    weights, histories, notes = [], [], []
    for count in (1, processes):
        recipe = prepare_recipe(target_folder.parent, count, drafter)
        if count == 1:
            train_and_record(recipe)
        else:
            run_in_processes(train_and_record, count, recipe)
        folder = RunFolder(recipe)
        weights.append(load_file(folder.drafter / "model.safetensors"))
        histories.append(json.loads((folder.drafter / "training.json").read_text())["history"])
        notes.append([json.loads((folder.root / f"seen{rank}.json").read_text()) for rank in range(count)])
    torch.testing.assert_close(weights[1], weights[0], atol=1e-6, rtol=0)
    for expected, entry in zip(*histories, strict=True):
        for key in entry:
            if "loss" in key or "accuracy" in key or "tau" in key or key in ("grad_norm", "learning_rate"):
                assert entry[key] == pytest.approx(expected[key], abs=2e-4), key
    for ranks in notes:
        rows = Counter(tuple(row) for note in ranks for batch in note["rows"] for row in batch)
        assert set(rows.values()) == {EPOCHS}
        assert len(rows) == len(LENGTHS) - EVAL_ROWS
        drawn = [number for note in ranks for number in note["drawn"]]
        assert len(set(drawn)) == len(drawn)  # no row repeats on any rank
    losses = [entry["eval_loss"] for entry in histories[0] if "eval_loss" in entry]
    assert losses[-1] < losses[0] - 1e-3  # otherwise equal weights would prove nothing


def test_parts_of_processes_are_added_up(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are averaged over processes: of two, the loss of each counts twice."""
    losses: list[Tensor] = []

    class TwoProcesses(DrafterTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            losses.append(super().compute_loss(*args, **kwargs))
            with monkeypatch.context() as patch:
                patch.setattr(DrafterTrainingArguments, "world_size", 2)
                losses.append(super().compute_loss(*args, **kwargs))
            return losses[-2]

    monkeypatch.setattr(stage, "DrafterTrainer", TwoProcesses)
    train_drafter(make_recipe(target_folder, "two", max_steps=1))
    assert losses[1] == 2 * losses[0]


def test_expected_rows_equal_kept_rows(target_folder: Path) -> None:
    """With dropped masks the loss is divided by the expected number of rows, which the draws approximate."""
    from support.tiny_models import tiny_drafter_of, tiny_target

    drafter = tiny_drafter_of("parallel", tiny_target(), num_masks=3, keep_ratio=0.5, keep_ratio_min=0.2).train()
    ids = torch.arange(4000).remainder(50).add(3).view(10, 400)
    mask = torch.ones_like(ids)
    expected = drafter.label_counts(drafter.groups(ids, mask))
    assert expected[0].tolist() == pytest.approx([3990, 3980 / 2, 3970 / 4, 3960 / 5])
    labels = depth_labels(ids, mask, 4)
    kept = active(labels, drafter.config.options.kept_shares, drafter.generator).sum((0, 2))[1:]
    assert torch.allclose(kept.float(), expected[0, 1:], rtol=0.1)
