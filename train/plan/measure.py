"""`draftsmith plan --measure`: memory and seconds of a training step, by running a few on this device."""

import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.kernels.cuda_attention import without_cudnn_attention
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.trainer import DrafterTrainer
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.processes.launch import errors_in_sentences

STEPS = 4  # the first ones allocate, and compile kernels


@dataclass(frozen=True)
class MeasuredStep:
    """Measured memory and speed of optimizer steps in one process, with all micro-batches of a step.

    peak_bytes: the most that torch had allocated on a GPU; on a CPU the process's largest resident size, all libraries
    included.
    """

    peak_bytes: int
    tokens_per_s: float
    device: str


@errors_in_sentences()
def measure_step(recipe: Recipe, length: int, labelled: int) -> MeasuredStep:
    """Train a new drafter for a few steps on rows of `length` tokens, of which the last `labelled` carry loss.

    Loads the target; writes nothing into the run's folder.

    Raises:
        UserError: The recipe trains on features from disk, the target cannot be loaded, or memory ran out.
    """
    if recipe.data.features.source != "online":
        raise UserError("option --measure runs the target in each step: set data.features.source=online")
    with tempfile.TemporaryDirectory(prefix="draftsmith-plan-") as folder:
        left_out = ("eval_strategy", "load_best_model_at_end", "report_to")
        values = {key: value for key, value in recipe.train.items() if key not in left_out}
        values |= {"max_steps": STEPS, "save_strategy": "no", "logging_strategy": "steps", "logging_steps": 1}
        args = training_arguments(values, Path(folder), recipe.seed, recipe.target.device == "cpu", processes=1)
        target, _ = load_target(recipe.target)
        torch.manual_seed(recipe.seed)
        ids = torch.randint(target.get_input_embeddings().weight.shape[0], (length,)).tolist()
        row = {"input_ids": ids, "loss_mask": [0] * (length - labelled) + [1] * labelled}
        num_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        rows = Dataset.from_list([row] * num_rows)
        drafter = load_drafter_class(recipe.drafter.kind).from_target(target, recipe.drafter.options)
        drafter.prepare_draft_vocab(rows)
        trainer = DrafterTrainer(drafter, target, args, rows)
        with without_cudnn_attention():
            trainer.train()
    if args.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(args.device)
    else:
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    rates = [log["tokens_per_s"] for log in trainer.state.log_history if "tokens_per_s" in log]
    return MeasuredStep(peak_bytes, rates[-1], args.device.type)
