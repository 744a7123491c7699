"""Conversion of the recipe's `train:` section to `transformers.TrainingArguments`; errors name the key.

Three keys are ours. `global_batch_size` is the number of rows of an optimizer step over all processes. The learning
rate was chosen for it, so it does not depend on the launch; `per_device_train_batch_size` and
`gradient_accumulation_steps` follow from it. `optimizer` and `muon_learning_rate` choose Muon, see `optimizer.py`.
"""

import dataclasses
import logging
import os
import typing
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import get_int_from_env
from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from draftsmith.errors import UserError, did_you_mean
from draftsmith.recipes.run_folder import MPI_WORLD_SIZES, RunFolder, is_first_process
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.optimizer import OptimizerName
from draftsmith.train.processes.launch import awaiting_processes, leave_at_exit, let_recipe_decide

GLOBAL_BATCH = "global_batch_size"
# Of `data.features.source: server`: the fewest and most processes that ask for rows, a micro-batch at a time, and the
# micro-batches that each of them has ahead of training.
SERVED_WORKERS, MOST_SERVED_WORKERS, SERVED_BATCHES = 4, 16, 4


@dataclasses.dataclass
class DrafterTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` and the optimizer of the drafter's matrices with its learning rate.

    Args:
        optimizer: `adamw` for all weights, or `muon` for the matrices of linear layers (`muon_with_adamw`).
        muon_learning_rate: Peak rate of Muon; by default `learning_rate`, which is AdamW's.
    """

    optimizer: OptimizerName = "adamw"
    muon_learning_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.muon_learning_rate is not None and not self.muon_learning_rate > 0:
            raise ValueError("muon_learning_rate must be above 0")
        if self.muon_learning_rate is not None and self.optimizer != "muon":
            raise ValueError("muon_learning_rate is read with optimizer=muon only: set that too, or leave it out")


TYPES = {**typing.get_type_hints(DrafterTrainingArguments), GLOBAL_BATCH: int}
KEYS = {GLOBAL_BATCH, *(field.name for field in dataclasses.fields(DrafterTrainingArguments) if field.init)}

logger = logging.getLogger(__name__)


def recipe_arguments(recipe: Recipe, processes: int | None = None) -> DrafterTrainingArguments:
    """Return the arguments of a recipe's training.

    Args:
        processes: Number of processes to plan for; None: as many as were launched.

    Raises:
        UserError: A key of `train` does not exist or has a wrong value.
    """
    values, folder = {"run_name": recipe.name, **recipe.train}, RunFolder(recipe).drafter / "checkpoints"
    features, use_cpu = recipe.data.features, recipe.target.device == "cpu"
    in_flight = features.server.in_flight if features.source == "server" else None
    return training_arguments(values, folder, recipe.seed, use_cpu, processes, in_flight)


def training_arguments(
    values: dict[str, Any],
    output_dir: Path,
    seed: int,
    use_cpu: bool = False,
    processes: int | None = None,
    in_flight: int | None = None,
) -> DrafterTrainingArguments:
    """Build the Trainer's arguments from our defaults and `values`, with the global batch split over the processes.

    Args:
        values: The recipe's section `train`.
        processes: Number of processes to plan for; None: as many as were launched.
        in_flight: Rows that a process requests from servers at a time; None: features come from elsewhere.

    Raises:
        UserError: A key does not exist, or its value has the wrong type or does not go with the others.
    """
    let_recipe_decide(values)
    # accelerate may request a CPU too; and transformers rejects bf16 on a CPU unless use_cpu is set.
    accelerate_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    use_cpu = use_cpu or accelerate_cpu or not torch.accelerator.is_available()
    checked = {key: _checked(key, value) for key, value in values.items()}
    launched = get_int_from_env(["WORLD_SIZE", *MPI_WORLD_SIZES], 1)  # as accelerate reads them
    checked = _split_global_batch(checked, launched if processes is None else processes)
    defaults = {
        "output_dir": str(output_dir),
        "seed": seed,
        "report_to": "none",
        "project": "draftsmith",  # of trackers
        "logging_nan_inf_filter": False,  # which would wait for the device twice a micro-batch
        "use_cpu": use_cpu,
        "dataloader_pin_memory": not use_cpu,
        "accelerator_config": {"non_blocking": not use_cpu},  # batches travel while the step before is computed
    }
    if "per_device_train_batch_size" in checked:
        # So that evaluation takes no more memory than training: transformers' default is eight rows.
        defaults["per_device_eval_batch_size"] = checked["per_device_train_batch_size"]
    if in_flight is not None:  # rows are requested ahead of their step
        workers = -(-in_flight // checked.get("per_device_train_batch_size", 8))
        defaults["dataloader_num_workers"] = max(SERVED_WORKERS, min(MOST_SERVED_WORKERS, workers))
        defaults["dataloader_prefetch_factor"] = SERVED_BATCHES
    if checked.get("remove_unused_columns"):
        raise UserError("key `train.remove_unused_columns` cannot be true: the drafter needs the column `loss_mask`")
    if checked.get("average_tokens_across_devices") is False:
        raise UserError(
            "key `train.average_tokens_across_devices` cannot be false, as a step's loss is a mean over all processes' "
            "labels: leave it out"
        )
    if checked.get("gradient_checkpointing"):
        raise UserError("key `train.gradient_checkpointing`: drafters do not support it: leave it out")
    try:
        with awaiting_processes(launched):
            args = DrafterTrainingArguments(**{**defaults, **checked, "remove_unused_columns": False})
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"section `train`: {' '.join(str(error).split())}") from None
    try:
        for tracker in get_reporting_integration_callbacks(args.report_to):
            tracker()  # raises an error if its package is not installed, which the Trainer would show after the target
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"key `train.report_to`: {' '.join(str(error).split())}") from None
    leave_at_exit()
    if processes is None and args.world_size < launched:  # a GPU is joined by LOCAL_RANK only
        raise UserError(f"{launched} processes were launched, and LOCAL_RANK is not set: start them by `torchrun`")
    if args.n_gpu > 1:
        # Without a launcher the Trainer would take all of them by nn.DataParallel, which copies no target.
        args._n_gpu = 1
    _check_no_repeated_rows(args)
    return args


def _split_global_batch(values: dict[str, Any], processes: int) -> dict[str, Any]:
    """Replace the global batch by the largest allowed rows per forward of a process, and accumulation steps."""
    if GLOBAL_BATCH not in values:
        rows = values.get("per_device_train_batch_size", 8) * values.get("gradient_accumulation_steps", 1)
        if processes > 1 and is_first_process():
            logger.warning(
                "%d processes train on %s rows per step, one process would on %s: set train.%s in place of "
                "train.per_device_train_batch_size for as many with any number of processes",
                processes, rows * processes, rows, GLOBAL_BATCH,
            )  # fmt: skip
        return values
    global_batch = values.pop(GLOBAL_BATCH)
    most = values.get("per_device_train_batch_size", global_batch)
    if "gradient_accumulation_steps" in values:
        raise UserError(f"key `train.gradient_accumulation_steps`: leave it out: train.{GLOBAL_BATCH} decides it")
    if not 0 < most <= global_batch:
        raise UserError(
            f"key `train.per_device_train_batch_size` is {most}: it is the number of rows in one forward pass of a "
            f"process and must be from 1 to {global_batch}, which is train.{GLOBAL_BATCH}; for larger steps raise that"
        )
    if global_batch % processes:
        raise UserError(
            f"key `train.{GLOBAL_BATCH}`: {global_batch} rows cannot be shared evenly by {processes} processes: launch "
            "a number of processes that divides it, or change it"
        )
    share = global_batch // processes
    rows = next(rows for rows in range(min(most, share), 0, -1) if share % rows == 0)
    return {**values, "per_device_train_batch_size": rows, "gradient_accumulation_steps": share // rows}


def _check_no_repeated_rows(args: TrainingArguments) -> None:
    """Check that no option fills an epoch's last step with rows that were trained on already.

    Raises:
        UserError: An option repeats rows.
    """
    config = args.accelerator_config
    for key in ("split_batches", "dispatch_batches"):
        if getattr(config, key) and args.world_size > 1:
            raise UserError(f"key `train.accelerator_config`: {key} trains on an epoch's last rows twice: leave it out")
    if args.train_sampling_strategy == "batch_rebalance" and args.world_size * args.gradient_accumulation_steps > 1:
        raise UserError(
            "key `train.train_sampling_strategy`: batch_rebalance trains on some rows twice: use group_by_length"
        )


def _checked(key: str, value: Any) -> Any:
    """Return the value of a key of `train`, validated by its type in `transformers.TrainingArguments`."""
    if key not in KEYS:
        hint = did_you_mean(key, KEYS, "valid keys are those of transformers.TrainingArguments")
        raise UserError(f"unknown key `train.{key}`: {hint}")
    if key == "hub_token":  # every checkpoint would hold it
        raise UserError("key `train.hub_token` does not belong in a recipe: put it into the environment as HF_TOKEN")
    if key == "push_to_hub" and value:  # transformers' would send every checkpoint, optimiser and settings with it
        raise UserError("key `train.push_to_hub`: leave it out; `draftsmith push RECIPE` publishes the trained drafter")
    value = "no" if value is False and key.endswith("_strategy") else value  # YAML reads a bare no as false
    try:
        return TypeAdapter(TYPES[key], config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise UserError(f"key `train.{key}`: {message[0].lower()}{message[1:]}, not {value!r}") from None
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value  # a type that only transformers understands
