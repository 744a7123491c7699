"""The train stage: tokens and a target in, a drafter folder out. What `draftsmith train` and `train_parallel.py` call.

`runs/<name>/drafter/` gets `settings.json` before the first step, `checkpoints/` on the way, then `config.json`,
`model.safetensors`, `training.json`, which marks the folder as finished, and the model card.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils import deterministic
from transformers import PreTrainedModel, TrainingArguments

from draftsmith.data.distill.limits import check_tokens, target_limits
from draftsmith.data.distill.token_dataset import load_tokens, tokens_hash
from draftsmith.errors import UserError
from draftsmith.files import bytes_text, free_bytes_at, write_atomically, write_json
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import Start, load_drafter_class
from draftsmith.models.kernels.cuda_attention import without_cudnn_attention
from draftsmith.models.target.architectures import is_known
from draftsmith.models.target.checks import check_logits
from draftsmith.models.target.features import required_layers
from draftsmith.models.target.loading import load_target_config, weights_hash
from draftsmith.models.weights import weights_sha256
from draftsmith.recipes.run_folder import (
    STARTED_FILE,
    TRAINING_FILE,
    RunFolder,
    as_distilled,
    check_settings,
    target_settings,
    with_run_lock,
)
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.checkpoints import (
    check_same_launch,
    newest_checkpoint,
    set_damaged_aside,
)
from draftsmith.train.drafter.model_card import write_drafter_card
from draftsmith.train.drafter.report import TrainReport
from draftsmith.train.drafter.rows import PackedRows, check_packing, split_rows
from draftsmith.train.drafter.start import start_folder, start_from, start_sentence
from draftsmith.train.drafter.trainer import DrafterTrainer, StopOnInterrupt
from draftsmith.train.drafter.training_arguments import recipe_arguments
from draftsmith.train.features.served import open_features
from draftsmith.train.features.stored import check_offline_support
from draftsmith.train.processes.frozen_target import drafter_options, load_frozen_target, move_models
from draftsmith.train.processes.launch import errors_in_sentences

# Keys of `train:` that change outputs and not the weights: they may differ when a run is resumed.
HARMLESS_TRAIN_KEYS = (
    "logging_steps", "logging_strategy", "save_steps", "save_strategy", "save_total_limit", "report_to",
    "disable_tqdm", "dataloader_num_workers", "run_name", "log_level", "eval_strategy", "eval_steps", "eval_delay",
    "eval_on_start", "per_device_eval_batch_size",
)  # fmt: skip

# Of these, what decides which weights are kept, with `load_best_model_at_end`.
EVALUATION_KEYS = ("eval_strategy", "eval_steps", "eval_delay", "save_strategy", "save_steps")


@with_run_lock("train")
@errors_in_sentences()
def train_drafter(recipe: Recipe) -> TrainReport:
    """Train the recipe's drafter on `runs/<name>/data/tokens`, resuming from the last checkpoint if there is one.

    Raises:
        UserError: There are no tokens yet, an option is wrong, memory ran out, or the folder's drafter was trained with
            other settings.
        LostProcess: Another process of this training ended.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the current step was finished and saved.
    """
    recipe, contradiction = as_distilled(recipe)
    run = RunFolder(recipe)
    args = recipe_arguments(recipe)
    online = recipe.data.features.source == "online"
    if not online:
        check_offline_support(recipe)
    tokens = load_tokens(run)
    to_train, to_eval = split_rows(tokens, recipe.data.eval_rows_frac)
    if args.eval_strategy != "no" and to_eval is None:
        raise UserError(
            f"key `train.eval_strategy`: {args.eval_strategy.value} needs held-out examples: hold some out of "
            "training with data.eval_rows_frac=0.02"
        )
    begun_from = start_folder(recipe)
    settings, started = _settings(recipe, tokens, begun_from), run.drafter / STARTED_FILE
    check_settings(started, settings, "train from scratch")
    if (run.drafter / TRAINING_FILE).is_file():
        return TrainReport.read(run.drafter)
    check_tokens(tokens, target_limits(load_target_config(recipe.target)), run.data / "tokens")

    target, drafter, start = _target_and_drafter(recipe, args, to_train, begun_from)
    if online and not is_known(target.config.get_text_config()):
        check_logits(target)
    rows: Dataset | PackedRows = to_train
    if recipe.data.packing:
        if online:  # elsewhere no document is computed
            check_packing(target)
        rows = PackedRows(to_train, recipe.data.max_length_tokens)
    stored = None if online else open_features(recipe, tokens, target, required_layers(drafter))
    stop = StopOnInterrupt()
    trainer = DrafterTrainer(drafter, target, args, rows, stored, to_eval)
    trainer.add_callback(stop)
    if args.load_best_model_at_end:
        args.metric_for_best_model, args.greater_is_better = f"tau_depth{drafter.config.num_depths}", True
    if trainer.is_world_process_zero():
        _check_free_space(run.drafter, drafter)
        write_json(started, settings)
        if contradiction:
            print(f"{recipe.name}: {contradiction}")
        run.record("train", {} if begun_from is None else {str(f): f for f in begun_from.glob("*.safetensors")})
        if start is not None:
            print(f"{recipe.name}: {start_sentence(start)}")
        elif drafter.vocab_coverage is not None:
            print(f"{recipe.name}: {drafter.vocab_coverage.sentence()}")
    checkpoint = _find_checkpoint(trainer)
    finished = checkpoint if checkpoint is not None and trainer.restore_counts(checkpoint) else None
    try:
        if finished is not None:
            trainer.restore(finished)
        else:
            with _deterministic(args), without_cudnn_attention():
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        stop.restore()
    if trainer.state.global_step < trainer.state.max_steps:
        stop.raise_interrupt()
    trainer.evaluate_at_end()
    trained = set(drafter.parameters())  # some may be inside the target
    if any(parameter.grad is not None for parameter in target.parameters() if parameter not in trained):
        raise AssertionError("the target is frozen, yet it got a gradient")
    _save(trainer, run.drafter, settings, start)
    if trainer.is_world_process_zero():
        write_drafter_card(recipe)
    if stop.requested:  # in the last step
        stop.raise_interrupt()
    return TrainReport.read(run.drafter, was_finished=False)


def _target_and_drafter(
    recipe: Recipe, args: TrainingArguments, to_train: Dataset, begun_from: Path | None
) -> tuple[PreTrainedModel, Drafter, Start | None]:
    """Return the frozen target and the new drafter on this process's device; DDP copies the first one's weights."""
    target = load_frozen_target(recipe, args.device)
    torch.manual_seed(args.seed)
    drafter = load_drafter_class(recipe.drafter.kind).from_target(target, drafter_options(recipe))
    drafter.prepare_draft_vocab(to_train)
    start = None if begun_from is None else start_from(drafter, begun_from, str(recipe.drafter.init))
    move_models(recipe, target, drafter, args.device)
    return target, drafter, start


@contextmanager
def _deterministic(args: TrainingArguments) -> Iterator[None]:
    """Make torch's kernels deterministic in this context, if training runs on a CPU.

    With several threads torch's scatter-like kernels (mainly the backward of indexing) sum in the order in which
    threads finish. Results still depend on the number of threads, which splits sums. On CUDA the Trainer's slower
    `train.full_determinism: true` does the same.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    checks: Any = deterministic  # its flag is a property that type checkers do not see
    fills = checks.fill_uninitialized_memory
    if args.device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        checks.fill_uninitialized_memory = False  # finds bugs, and costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        checks.fill_uninitialized_memory = fills


def _check_free_space(folder: Path, drafter: Drafter) -> None:
    """Check the free disk space before training, for at least one checkpoint and the final weights.

    Raises:
        UserError: There is less.
    """
    needed_bytes = 2 * sum(p.numel() * p.element_size() for p in drafter.parameters() if p.requires_grad)
    free_bytes = free_bytes_at(folder)
    if free_bytes < needed_bytes:
        raise UserError(
            f"{folder} needs {bytes_text(needed_bytes)} at least, for a checkpoint and the trained weights, but only "
            f"{bytes_text(free_bytes)} are free on that disk: free some, or set runs_dir to another disk"
        )


def _find_checkpoint(trainer: DrafterTrainer) -> Path | None:
    """Return the checkpoint to resume from, the same in all processes; say which it is, and which are damaged.

    Raises:
        UserError: The checkpoint was written by another number of processes, or has a model that was split among them.
    """
    folder = Path(trainer.args.output_dir)
    if trainer.is_world_process_zero():
        for sentence in set_damaged_aside(folder):
            print(sentence)
    trainer.accelerator.wait_for_everyone()
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        return None
    check_same_launch(checkpoint, trainer.args.world_size)
    if trainer.is_world_process_zero():
        print(f"resuming from {checkpoint}")
    return checkpoint


def _settings(recipe: Recipe, tokens: Dataset, begun_from: Path | None) -> dict[str, Any]:
    """Return the settings that the trained weights depend on, flat, by recipe key; without keys that are not set."""
    data, features = recipe.data, recipe.data.features
    harmless = set(HARMLESS_TRAIN_KEYS)
    harmless -= set(EVALUATION_KEYS) if recipe.train.get("load_best_model_at_end") else set()
    settings = {
        "seed": recipe.seed,
        **target_settings(recipe),
        "the target's weights (hash)": weights_hash(recipe.target),
        "drafter.kind": recipe.drafter.kind,
        **{f"drafter.options.{key}": value for key, value in recipe.drafter.options.items()},
        **{f"train.{key}": value for key, value in recipe.train.items() if key not in harmless},
        "data.features.source": None if features.source == "online" else features.source,
        "data.features.dtype": None if features.source == "online" else features.dtype,
        "data (its tokens)": tokens_hash(tokens),
        "data.eval_rows_frac": data.eval_rows_frac or None,
        "data.packing, rows of": data.max_length_tokens if data.packing else None,
        "drafter.init (its weights)": None if begun_from is None else " ".join(weights_sha256(begun_from).values()),
    }
    return {key: value for key, value in settings.items() if value is not None}


def _save(trainer: DrafterTrainer, folder: Path, settings: dict[str, Any], start: Start | None) -> None:
    """Write the trained drafter and the training's figures and settings into `folder`."""
    args = trainer.args
    trainer.save_model(str(folder))
    drafter = trainer.accelerator.unwrap_model(trainer.model)
    covered = None if drafter.vocab_coverage is None else drafter.vocab_coverage.coverage
    reproducible = "this device, these versions" if args.full_determinism else None
    if args.device.type == "cpu":
        threads = torch.get_num_threads()
        reproducible = f"this processor, these versions, {threads} threads, {args.world_size} process(es)"
    if trainer.is_world_process_zero():
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle; settings.json says the same
        metrics = {
            "steps": trainer.state.global_step,
            "best_step": trainer.best_step,
            "epochs": trainer.state.epoch,
            "wall_time_s": round(trainer.progress.elapsed_s, 1),
            "waited_for_batches_s": round(trainer.progress.waited_s, 1),
            "tokens": trainer.progress.tokens,
            "batch_size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "rows": len(trainer.train_dataset),
            "heldout_rows": None if trainer.eval_dataset is None else len(trainer.eval_dataset),
            "reproducible": reproducible,
            "weights_sha256": weights_sha256(folder),
            "target_change": getattr(drafter, "target_change", None),
            **({} if start is None else {"start": asdict(start)}),
            "draft_vocabulary_coverage": covered,
            "history": trainer.state.log_history,
            "settings": settings,
        }
        write_atomically(folder / TRAINING_FILE, json.dumps(metrics, indent=1) + "\n")
    trainer.accelerator.wait_for_everyone()
