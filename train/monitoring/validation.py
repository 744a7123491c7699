"""What the rows kept out of training decide while it runs: which weights are kept, and when it ends.

The metric is tau of the longest chain, replayed on the target's own answers (`train/drafter/evaluation.py`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.train.processes.launch import Launch


def refuse_validation(recipe: Recipe, args: TrainingArguments, launch: Launch) -> None:
    """
    Raises:
        UserError: `validation` asks for what the other sections, or the launch, cannot give.
    """
    wanted = recipe.validation
    decides = "validation.keep=best" if wanted.keep == "best" else "validation.patience" if wanted.patience else None
    if decides is not None and args.eval_strategy == "no":
        raise UserError(f"key `{decides}` needs evaluations: set train.eval_strategy=steps and train.eval_steps")
    if wanted.keep == "best" and args.save_strategy == "no":
        raise UserError("key `validation.keep`: the best weights are a checkpoint's: leave out train.save_strategy=no")
    if wanted.keep == "best" and launch.strategy in ("fsdp", "zero"):
        raise UserError(
            f"key `validation.keep`: {launch.name} ends with the weights of its last step: leave it out, or launch "
            "with recipes/accelerate/multi_gpu.yaml"
        )
    if wanted.decode_steps is None:
        return
    key = "key `validation.decode_steps`"
    if not recipe.data.eval_rows_frac:
        raise UserError(f"{key} takes its prompts from rows kept out of training: set data.eval_rows_frac=0.02")
    if recipe.data.features.source == "offline":
        raise UserError(f"{key} needs the target, which does not run with data.features.source=offline: leave it out")
    if launch.splits_weights or recipe.data.features.sharded:
        raise UserError(f"{key} needs target and drafter whole in every process: leave it out, or do not split them")


def validation_callbacks(
    recipe: Recipe, args: TrainingArguments, num_depths: int, decode: Callable[[], None]
) -> list[TrainerCallback]:
    """What the Trainer is to call; `decode` is called every `validation.decode_steps`."""
    wanted, callbacks = recipe.validation, []
    if wanted.keep == "best" or wanted.patience is not None:
        args.metric_for_best_model, args.greater_is_better = f"tau_depth{num_depths}", True
        callbacks.append(BestWeights(wanted.keep == "best"))
    if wanted.patience is not None:
        callbacks.append(EarlyStopping(wanted.patience))
    if wanted.decode_steps is not None:
        callbacks.append(DecodeEvery(wanted.decode_steps, decode))
    return callbacks


class BestWeights(TrainerCallback):
    """Evaluates the last step too; with `keep` saves a checkpoint of every new best."""

    def __init__(self, keep: bool = True) -> None:
        self._keep = keep

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.best_global_step:  # the folder may have moved since
            state.best_model_checkpoint = str(best_checkpoint(args, state))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps and args.eval_strategy == "steps":  # by epochs it comes of itself
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        tau = metrics.get(f"eval_{args.metric_for_best_model}")
        if tau is None:
            raise UserError("the rows kept out of training hold no answer to validate on: raise data.eval_rows_frac")
        if self._keep and (state.best_metric is None or tau > state.best_metric):
            control.should_save = True


class EarlyStopping(EarlyStoppingCallback):
    """transformers', whichever weights are kept; `stopped` is in the checkpoints."""

    stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, metrics, **kwargs)
        self.stopped = self.early_stopping_patience_counter >= self.early_stopping_patience

    def state(self) -> dict[str, Any]:
        saved: dict[str, Any] = super().state()
        saved["attributes"]["stopped"] = self.stopped
        return saved


class DecodeEvery(TrainerCallback):
    """Every so many steps."""

    def __init__(self, steps: int, decode: Callable[[], None]) -> None:
        self._steps, self._decode = steps, decode

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            self._decode()


def best_checkpoint(args: TrainingArguments, state: Any) -> Path:
    """Of the best evaluation so far.

    Raises:
        UserError: It is not there any more.
    """
    folder = Path(str(args.output_dir)) / f"checkpoint-{state.best_global_step}"
    if not folder.is_dir():
        raise UserError(f"{folder}, the best by validation, is gone: put it back, or set validation.keep=last")
    return folder
