"""One training run of the embedded target, from recipe to exported checkpoint; resumes from its own work folder."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from transformers.trainer_callback import TrainerState

from draftsmith.data.stdlib.conversations import build_conversations
from draftsmith.models.compiling import can_compile
from draftsmith.recipes.target_schema import EmbeddedTargetRecipe, ScheduleSection
from draftsmith.train.drafter.checkpoints import newest_whole_checkpoint
from draftsmith.train.drafter.interrupt import StopOnInterrupt
from draftsmith.train.embedded_target.build import (
    TargetTrainer,
    build_model,
    collate,
    export_target,
    pack_rows,
    train_tokenizer,
)
from draftsmith.train.embedded_target.clock import SnapshotCallback, TrainingClock, rate_multiplier

logger = logging.getLogger(__name__)


def train_target(recipe: EmbeddedTargetRecipe, snapshot_dir: Path | None = None) -> str | None:
    """Trains to the end of the recipe's schedule and writes `recipe.output_dir`.

    Returns a sentence about the run for the model card; of several processes the first one does.

    An earlier, interrupted run in `recipe.work_dir` is continued. Intermediate exports go to `snapshot_dir`, if given.

    Raises:
        KeyboardInterrupt: Ctrl-C; the step at work was finished and saved.
    """
    corpus, schedule = recipe.corpus, recipe.schedule
    conversations = build_conversations(corpus.seed, "train", corpus.limit)
    tokenizer = train_tokenizer(
        [message["content"] for conversation in conversations for message in conversation["messages"]], recipe.model
    )
    rows = pack_rows(tokenizer, conversations, corpus.row_tokens, corpus.user_token_weight)
    eval_rows = pack_rows(tokenizer, build_conversations(corpus.seed, "heldout", corpus.limit), corpus.row_tokens, 0.0)
    model = build_model(recipe.model, tokenizer, schedule.seed)
    arguments = _training_arguments(recipe)
    steps_per_epoch = max(1, len(rows) // (schedule.rows_per_step * arguments.world_size))
    clock = TrainingClock(max(1, round(schedule.epochs * steps_per_epoch)), schedule.max_minutes)
    logger.info(
        "%d conversations in %d rows, %d parameters, at most %d steps or %g minutes",
        len(conversations), len(rows), model.num_parameters(), clock.max_steps, schedule.max_minutes,
    )  # fmt: skip
    arguments.max_steps = clock.max_steps
    optimizer, stop = _optimizer(model, schedule), StopOnInterrupt()
    trainer = TargetTrainer(
        model=model,
        args=arguments,
        data_collator=collate,
        train_dataset=rows,
        eval_dataset=eval_rows[: corpus.eval_rows],
        callbacks=[clock, stop],
        optimizers=(optimizer, LambdaLR(optimizer, rate_multiplier(clock, schedule))),
    )
    if snapshot_dir is not None:
        trainer.add_callback(
            SnapshotCallback(
                clock,
                schedule.snapshot_minutes,
                lambda: _export(trainer, tokenizer, snapshot_dir, torch.bfloat16),
            )
        )
    if schedule.compile and can_compile():
        model.compile()
    checkpoint = newest_whole_checkpoint(recipe.work_dir)
    if checkpoint:
        saved = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).stateful_callbacks
        clock.elapsed_s = saved[type(clock).__name__]["attributes"]["elapsed_s"]
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        stop.restore()
    if stop.requested:
        logger.info("stopped; the same command goes on from %s", recipe.work_dir)
        stop.raise_interrupt()
    _export(trainer, tokenizer, recipe.output_dir, torch.bfloat16)
    if not trainer.is_world_process_zero():
        return None
    steps, rows_per_step = trainer.state.global_step, schedule.rows_per_step * arguments.world_size
    return (
        f"The run took {steps:,} steps of {rows_per_step} rows of {corpus.row_tokens} tokens "
        f"({steps / steps_per_epoch:.1f} epochs of {len(conversations):,} conversations) "
        f"in {clock.elapsed_s / 60:.0f} minutes."
    )


def _training_arguments(recipe: EmbeddedTargetRecipe) -> TrainingArguments:
    schedule = recipe.schedule
    return TrainingArguments(
        output_dir=str(recipe.work_dir),
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        per_device_train_batch_size=schedule.rows_per_step,
        per_device_eval_batch_size=schedule.rows_per_step,
        max_grad_norm=1.0,
        seed=schedule.seed,
        logging_steps=25,
        save_steps=schedule.save_steps,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=schedule.eval_steps,
        prediction_loss_only=True,
        label_names=["loss_weights"],
        remove_unused_columns=False,
        dataloader_drop_last=True,
        report_to=[],
        disable_tqdm=True,
    )


def _optimizer(model: LlamaForCausalLM, schedule: ScheduleSection) -> torch.optim.Optimizer:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95))


def _export(trainer: TargetTrainer, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype) -> None:
    if trainer.is_world_process_zero():
        export_target(trainer.accelerator.unwrap_model(trainer.model), tokenizer, folder, dtype)
        logger.info("wrote %s", folder)
