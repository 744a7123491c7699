"""`transformers.Trainer` with a frozen target in the same step, and the loss and accuracy of every depth in the log.

Or, offline, with the target's features from disk (`features/cache.py`).

Shapes: B batch, S sequence, D hidden, F features, G depths.
"""

import re
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.losses import DrafterOutput
from draftsmith.train.batches.collate import ROWS_COLUMN, collate_right_padded
from draftsmith.train.batches.packing import PackedRows
from draftsmith.train.features.cache import FeatureCache, FeatureCollator
from draftsmith.train.features.online import training_features


class LogLastStep(TrainerCallback):
    """The last step is logged, whatever `logging_steps` is: the report ends with it."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True


class DrafterTrainer(Trainer):
    """Trains a drafter on the features that its target computes in the same step (online: nothing on disk).

    `dataset` is that of the tokens, or its `PackedRows`. With a cache the features come from there, row by row of the
    tokens, and the target does not run.

    The target is neither wrapped nor saved: it stays outside the model that the Trainer knows.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: PreTrainedModel,
        args: TrainingArguments,
        dataset: Dataset | PackedRows,
        cache: FeatureCache | None = None,
        **kwargs: Any,
    ) -> None:
        collator: Any = collate_right_padded
        if cache is not None:
            collator = FeatureCollator(cache)
            if isinstance(dataset, Dataset):  # packed rows say themselves of which rows they are
                dataset = dataset.add_column(ROWS_COLUMN, [[row] for row in range(len(dataset))])
        super().__init__(model=drafter, args=args, train_dataset=dataset, data_collator=collator, **kwargs)
        self.add_callback(LogLastStep())
        self._drafter, self._target = drafter, target
        # Rows: loss sum, correct, labels of each depth; added up since the last log.
        self._depth_sums_3g: Tensor | None = None
        self._tokens: Tensor | None = None
        self.tokens_trained = 0  # by this process group, since it began or went on
        self._last_log_s = time.perf_counter()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        ids = inputs["input_ids"]
        self._drafter.training_step = self.state.global_step
        with torch.autocast(ids.device.type, enabled=False):
            # No attention mask: rows are padded on the right, where causal order is enough, and the kernels are faster.
            positions = inputs.get("position_ids")
            if "features" in inputs:
                features, teacher_features = self._drafter.split_features(inputs["features"].to(self._target.dtype))
            else:
                features, teacher_features = training_features(self._drafter, self._target, ids, positions)
        output: DrafterOutput = model(
            ids, features, inputs["loss_mask"], position_ids=positions, teacher_features=teacher_features
        )
        self._count(output, inputs["attention_mask"])
        return (output.loss, output) if return_outputs else output.loss

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> torch.utils.data.Sampler[int] | None:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.lengths = list(sampler.lengths)  # a dataset's column would be looked up in its file for each row
        return sampler

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        made_before = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if not made_before:
            apply_learning_rate_factors(optimizer, self._drafter)
        return optimizer

    def _count(self, output: DrafterOutput, attention_mask_bs: Tensor) -> None:
        sums = [output.depth_loss_sum, output.depth_correct, output.depth_count]
        step_3g = torch.stack([part.detach().double() for part in sums if part is not None])
        tokens = attention_mask_bs.sum()
        self._depth_sums_3g = step_3g if self._depth_sums_3g is None else self._depth_sums_3g + step_3g
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._depth_sums_3g is not None and self._tokens is not None:
            logs = {**logs, **self._depth_logs(self._depth_sums_3g, self._tokens)}
            self._depth_sums_3g = self._tokens = None
        super().log(logs, start_time)

    def _depth_logs(self, sums_3g: Tensor, tokens: Tensor) -> dict[str, float]:
        """Means over the labels of all batches and processes since the last log."""
        loss_g, correct_g, count_g = self.accelerator.reduce(sums_3g, reduction="sum").tolist()
        all_tokens = self.accelerator.reduce(tokens, reduction="sum").item()
        self.tokens_trained += int(all_tokens)
        now_s = time.perf_counter()
        depth_logs: dict[str, float] = {}
        for depth, (loss, correct, count) in enumerate(zip(loss_g, correct_g, count_g, strict=True), start=1):
            if count:
                depth_logs[f"loss_depth{depth}"] = round(loss / count, 4)
                depth_logs[f"accuracy_depth{depth}"] = round(correct / count, 4)
        depth_logs["tokens_per_s"] = round(all_tokens / (now_s - self._last_log_s), 1)
        self._last_log_s = now_s
        return depth_logs


def apply_learning_rate_factors(optimizer: torch.optim.Optimizer, drafter: Drafter) -> None:
    """Split a new optimizer's groups by `Drafter.learning_rate_factors`."""
    factors = drafter.learning_rate_factors()
    if not factors:
        return
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            prefixes = [prefix for prefix in factors if names[parameter].startswith(prefix)]
            by_factor.setdefault(factors[prefixes[0]] if prefixes else 1.0, []).append(parameter)
        groups += [
            {**group, "params": parameters, "lr": group["lr"] * factor} for factor, parameters in by_factor.items()
        ]
    optimizer.param_groups[:] = groups


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest `checkpoint-N` that was written to its end: `trainer_state.json` is written last."""
    found = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if path.stat().st_size]
    numbered = {int(match[1]): path for path in found if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))}
    return numbered[max(numbered)] if numbered else None
