"""`transformers.Trainer` for drafters, with the loss and accuracy of every depth in the log.

The target's features are computed in the same step, or read from disk (`stored.py`) or from servers (`served.py`).

Shapes: B batch, S sequence, D hidden, F features, G depths.
"""

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import rotate_checkpoints

from draftsmith.errors import Terminated, UserError
from draftsmith.files import share_as_usual
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.loss import DrafterOutput
from draftsmith.models.target.features import split_features
from draftsmith.progress import is_quiet
from draftsmith.train.drafter.checkpoints import STATE_FILE, write_manifest
from draftsmith.train.drafter.optimizer import apply_learning_rate_factors, muon_with_adamw
from draftsmith.train.drafter.rows import (
    ERROR,
    FeatureCollator,
    PackedRows,
    RowsByLength,
    collate_right_padded,
    even_out,
    heldout_metrics,
    heldout_sums,
)
from draftsmith.train.drafter.shown import HELD_OUT_PREFIX, ShownTraining, TrainingBar
from draftsmith.train.drafter.training_arguments import DrafterTrainingArguments
from draftsmith.train.features.stored import StoredFeatures

# A terminal's Ctrl-C reaches the launcher too, which passes it on: the same one, twice.
SAME_SIGNAL_S = 1.0
WORTH_SAYING_S = 10.0  # of one step's waiting for features from servers


class Progress(TrainerCallback, ExportableState):
    """Totals of a training, over all resumed runs; saved with every checkpoint.

    tokens: trained tokens of all processes. elapsed_s: seconds of steps and of the time between them. waited_s: the
    part of elapsed_s spent waiting for batches, as from slow servers of features.
    unlogged_steps, unlogged_loss, unlogged_4g: steps, their losses and `DrafterOutput.depth_sums` since the last log.
    logged_tokens, logged_s: `tokens` and `elapsed_s` at the last log.
    """

    def __init__(self) -> None:
        self.tokens, self.elapsed_s, self.waited_s = 0, 0.0, 0.0
        self.unlogged_steps, self.unlogged_loss, self.unlogged_4g = 0, 0.0, list[list[float]]()
        self.logged_tokens, self.logged_s = 0, 0.0
        self._last_s: float | None = None

    def state(self) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {"args": {}, "attributes": attributes}

    def add(self, tokens: int, loss: float, sums_4g: Tensor) -> None:
        """Add tokens, summed losses and `DrafterOutput.depth_sums` [4, G] of the steps since the last call."""
        self.tokens += tokens
        self.unlogged_loss += loss
        earlier = torch.tensor(self.unlogged_4g).to(sums_4g) if self.unlogged_4g else 0.0
        self.unlogged_4g = (earlier + sums_4g).tolist()

    def take_log(self) -> dict[str, float]:
        """Return mean loss, loss and accuracy by depth, and tokens/s since the last log; reset these sums."""
        logs = {"loss": self.unlogged_loss / self.unlogged_steps}
        for depth, (loss, correct, count, in_head) in enumerate(zip(*self.unlogged_4g, strict=True), start=1):
            if in_head:
                logs[f"loss_depth{depth}"] = round(loss / in_head, 4)
            if count:
                logs[f"accuracy_depth{depth}"] = round(correct / count, 4)
        seconds = max(self.elapsed_s - self.logged_s, 1e-9)
        logs["tokens_per_s"] = round((self.tokens - self.logged_tokens) / seconds, 1)
        self.unlogged_steps, self.unlogged_loss, self.unlogged_4g = 0, 0.0, []
        self.logged_tokens, self.logged_s = self.tokens, self.elapsed_s
        return logs

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last_s = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last_s = time.monotonic()  # evaluating is not training

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        now_s = time.monotonic()
        self.elapsed_s += now_s - (self._last_s or now_s)
        self._last_s = now_s
        self.unlogged_steps += 1
        if state.global_step >= state.max_steps:
            control.should_log = True  # whatever `logging_steps` is: the report ends with the last step


class DrafterTrainer(Trainer):
    """Trainer of a drafter on the features that its target computes in the same step (online: nothing on disk).

    `dataset` has the examples, or packed rows of them. With `stored` features these are read, by the numbers in the
    dataset's `ROWS_COLUMN`, and the target does not run.

    The target is neither wrapped nor saved: it stays outside the model that the Trainer knows.

    Methods are in the order in which the Trainer calls them: loaders, optimizer; a step's batches, loss and gradient
    norm; then log, checkpoint and evaluation. Methods that resume a training come last.
    """

    args: DrafterTrainingArguments
    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        drafter: Drafter,
        target: PreTrainedModel,
        args: DrafterTrainingArguments,
        dataset: Dataset | PackedRows,
        stored: StoredFeatures | None = None,
        eval_dataset: Dataset | None = None,
        **kwargs: Any,
    ) -> None:
        collator: Any = collate_right_padded if stored is None else FeatureCollator(stored)
        self._servers = [] if stored is None else stored.urls
        super().__init__(drafter, args, collator, train_dataset=dataset, eval_dataset=eval_dataset, **kwargs)
        self._drafter, self._target = drafter, target
        # Loss, tokens and `DrafterOutput.depth_sums`, [2 + 4G], of this process, since processes last added them up.
        self._counts: Tensor | None = None
        self.progress = Progress()
        self.add_callback(self.progress)
        self.remove_callback(ProgressCallback)
        self.remove_callback(PrinterCallback)
        if not is_quiet():
            self.add_callback(ShownTraining())
        if not is_quiet() and sys.stderr.isatty():
            self.add_callback(TrainingBar())

    def get_train_dataloader(self) -> DataLoader:
        return even_out(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        return even_out(super().get_eval_dataloader(eval_dataset))

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> torch.utils.data.Sampler[int] | None:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            lengths = list(sampler.lengths)  # a dataset's column would be looked up in its file for each row
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            # A step's rows are those of all processes.
            return RowsByLength(sampler.batch_size * self.args.world_size, lengths, seed)
        return sampler

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        try:
            optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        except (ImportError, ValueError) as error:
            raise UserError(f"key `train.optim`: {' '.join(str(error).split())}") from None
        apply_learning_rate_factors(optimizer, self._drafter)
        if self.args.optimizer == "muon":
            rate = self.args.muon_learning_rate or self.args.learning_rate
            optimizer = self.optimizer = muon_with_adamw(optimizer, self._drafter, rate)
        return optimizer

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """Return an optimizer step's micro-batches, and its label counts [2, G] over all processes (G depths).

        Row 0 counts the labels at each depth, row 1 those that the drafter's head has. Each batch gets `groups`, as
        labels are counted before the first forward, and `generator`, for random draws of its rows and in its forward.
        (transformers would count the labels of one depth, from a column that the batches do not have.)
        """
        begin_s = time.monotonic()
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        waited_s = time.monotonic() - begin_s
        self.progress.waited_s += waited_s
        if waited_s > WORTH_SAYING_S and self._servers and self.is_world_process_zero():
            print(f"a step waited {waited_s:.0f} s for features from {', '.join(self._servers)}", flush=True)
        counts = list[Tensor]()
        self._drafter.train()  # as in the forward
        for number, batch in enumerate(batches):
            # A micro-batch has the same random draws on any process, and after resuming.
            place = number * self.args.world_size + self.args.process_index
            seeds = np.random.SeedSequence((self.args.seed, self.state.global_step, place))
            generator = torch.Generator(self.args.device).manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
            self._drafter.generator = generator
            positions = batch.get("position_ids")
            positions = None if positions is None else positions.to(device)
            groups = self._drafter.groups(batch["input_ids"].to(device), batch["loss_mask"].to(device), positions)
            batch |= {"groups": groups, "generator": generator}
            counts.append(self._drafter.label_counts(groups))
        if not batches:
            return batches, None
        return batches, self.accelerator.reduce(torch.stack(counts).sum(0).to(device), reduction="sum")

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if ERROR in inputs:
            raise UserError(inputs[ERROR])
        return super()._prepare_inputs(inputs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Return a micro-batch's part of the loss of the optimizer step, times the number of processes.

        Args:
            num_items_in_batch: The step's label counts [2, G] at its G depths: all labels, and those in the head.
        """
        self._drafter.generator = inputs["generator"]
        output = self._forward(model, inputs, num_items_in_batch)
        loss_and_tokens = torch.stack([output.loss.detach().double(), inputs["attention_mask"].sum().double()])
        counts = torch.cat([loss_and_tokens, output.depth_sums.flatten()])
        self._counts = counts if self._counts is None else self._counts + counts
        # Gradients are averaged over processes, whose parts are to be added up.
        loss = output.loss * self.args.world_size
        return (loss, output) if return_outputs else loss

    def _forward(self, model: nn.Module, inputs: dict[str, Any], label_counts: Tensor | None = None) -> DrafterOutput:
        """Return the drafter's output for a batch; its features are computed by the target, or were read from disk."""
        self._drafter.training_step = self.state.global_step
        ids, positions, mask = inputs["input_ids"], inputs.get("position_ids"), inputs["attention_mask"]
        with torch.autocast(ids.device.type, enabled=False):
            if "features" in inputs:
                features, teacher = split_features(self._drafter, inputs["features"].to(self._target.dtype))
            else:
                features, teacher = self._drafter.training_features(self._target, ids, positions, mask)
        return model(
            ids,
            features,
            inputs["loss_mask"],
            position_ids=positions,
            teacher_features=teacher,
            label_counts=label_counts,
            groups=inputs.get("groups"),
        )

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm over all processes, which thus stop together.

        Raises:
            UserError: The loss or gradient is not finite. The step is not saved: it would put NaN into all weights.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is None or self.args.fp16:  # whose scaler skips steps with an infinite gradient
            return norm
        if not math.isfinite(norm):
            raise UserError(
                f"the loss or its gradient is not finite in step {self.state.global_step + 1} (the gradient's norm is "
                f"{float(norm)}), and the step was not saved: lower train.learning_rate or train.max_grad_norm, and "
                "train under another `name`"
            )
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self._sync_counts()
            logs = {**logs, **self.progress.take_log()}
        super().log(logs, start_time)

    def _sync_counts(self) -> None:
        """Sum the counts over all processes, for a log or a checkpoint; all processes must call it at the same step."""
        if self._counts is not None:
            counts, self._counts = self.accelerator.reduce(self._counts, reduction="sum").cpu(), None
            self.progress.add(int(counts[1]), float(counts[0]), counts[2:].view(4, -1))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.is_world_process_zero():
            share_as_usual(Path(output_dir or self.args.output_dir))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, its manifest when all of it is there, and only then delete older ones."""
        self._sync_counts()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        super()._save_checkpoint(model, trial)
        self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            write_manifest(checkpoint, self.args.world_size)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(self.args.output_dir, limit, best_model_checkpoint=best, use_mtime=True)

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Log and return loss, accuracy by depth and tau of greedy chains on the held-out examples.

        The random generators of training are not used, so that evaluating does not change the training.
        """
        model, sums = self.model_wrapped, []
        model.eval()
        with torch.random.fork_rng():
            for batch in self.get_eval_dataloader():
                inputs = self._prepare_inputs(batch)
                with self.accelerator.autocast():
                    output = self._forward(model, inputs)
                    sums.append(heldout_sums(output, inputs["loss_mask"]))
        model.train()
        whole = self.accelerator.reduce(torch.stack(sums).sum(0).to(self.args.device), reduction="sum")
        metrics = heldout_metrics(whole.cpu())
        metric = self.args.metric_for_best_model
        if metric is not None and f"{HELD_OUT_PREFIX}{metric}" not in metrics:
            raise UserError("the held-out examples contain no answer to validate on: raise data.eval_rows_frac")
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)  # type: ignore[has-type]
        return metrics

    def evaluate_at_end(self) -> None:
        """Evaluate the last step's weights, unless this was done already or the best weights are kept instead."""
        is_done = any("eval_loss" in log and log["step"] == self.state.global_step for log in self.state.log_history)
        if self.eval_dataset is not None and not is_done and not self.args.load_best_model_at_end:
            self.evaluate()

    def restore_counts(self, checkpoint: Path) -> bool:
        """Restore `progress` from a checkpoint; transformers' Trainer restores all other state.

        Returns:
            Whether training had finished when the checkpoint was written.
        """
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        for name, value in state["stateful_callbacks"][Progress.__name__]["attributes"].items():
            setattr(self.progress, name, value)
        return bool(state["global_step"] >= state["max_steps"])

    def restore(self, checkpoint: Path) -> None:
        """Restore the state and weights of a finished training: the best weights with `load_best_model_at_end`.

        From a checkpoint of the last step transformers' Trainer would train one more step.

        Raises:
            UserError: The checkpoint of the best weights is gone.
        """
        self.state = TrainerState.load_from_json(str(checkpoint / STATE_FILE))
        if self.best_step is not None:
            checkpoint = checkpoint.with_name(f"checkpoint-{self.best_step}")
            if not checkpoint.is_dir():
                raise UserError(
                    f"{checkpoint}, which holds the best weights by held-out examples, is missing: restore it, or set "
                    "train.load_best_model_at_end=false"
                )
        self._load_from_checkpoint(str(checkpoint))

    @property
    def best_step(self) -> int | None:
        """Return the step whose weights are kept as the best by held-out examples; None if the last ones are kept."""
        best = self.state.best_model_checkpoint
        return int(best.rpartition("-")[2]) if self.args.load_best_model_at_end and best else None


class StopOnInterrupt(TrainerCallback):
    """Callback that saves and stops after the current step at the first SIGINT or SIGTERM, in all processes.

    A second Ctrl-C stops immediately. A second SIGTERM does not: schedulers and launchers send several, and use SIGKILL
    in the end. `requested` is the signal, or 0.
    """

    def __init__(self) -> None:
        self.requested = 0
        self._since_s = 0.0
        self._previous: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # the only one that may handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if distributed.is_available() and distributed.is_initialized():
            shared = torch.tensor(self.requested, device=args.device)
            distributed.all_reduce(shared, distributed.ReduceOp.MAX)  # SIGTERM is larger than SIGINT
            self.requested = int(shared)
        if self.requested:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the signal handlers, at the end of training and after an error, which skips `on_train_end`."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def raise_interrupt(self) -> NoReturn:
        """Raise the exception of the received signal, once everything is saved."""
        raise Terminated if self.requested == signal.SIGTERM else KeyboardInterrupt

    def _request(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.requested and number == signal.SIGINT and now_s - self._since_s > SAME_SIGNAL_S:
            self.restore()
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._since_s = int(number), now_s
