"""What a launch, a recipe and a kind of drafter cannot do together, told by name before anything is loaded."""

import importlib.util
import os
from collections.abc import Iterator

from transformers import TrainingArguments

from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target.quantized import quantization_options
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.train.processes.launch import Launch

# Ways to split one sequence or one layer over devices, which accelerate's `parallelism_config` asks for.
SPLIT_MODELS = ("TP", "CP", "SP")


def refuse_what_cannot_work(recipe: Recipe, args: TrainingArguments, launch: Launch) -> None:
    """
    Raises:
        UserError: The first obstacle, with the way out.
    """
    quantization_options(recipe.target)  # asks for its library
    for obstacle in (*_of_the_launch(args, launch), *_of_the_target(recipe, launch), *_of_the_drafter(recipe, launch)):
        raise UserError(obstacle)


def _of_the_launch(args: TrainingArguments, launch: Launch) -> Iterator[str]:
    if launch.strategy == "megatron":
        yield (
            "accelerate was configured for Megatron-LM, which has no drafters: launch with one of the files in "
            "recipes/accelerate, such as multi_gpu.yaml"
        )
    if launch.strategy == "fsdp" and launch.version != 2:
        yield (
            f"accelerate was configured for FSDP version {launch.version}, which flattens the weights that depth "
            "weights and learning rates are given by name for: set fsdp_version: 2, as in "
            "recipes/accelerate/fsdp2.yaml"
        )
    if launch.strategy == "fsdp" and launch.processes < 2:
        yield "FSDP splits weights among processes and there is one: launch several, or leave FSDP out"
    if launch.strategy == "fsdp" and os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true":
        yield (
            "accelerate's fsdp_activation_checkpointing wraps modules that drafters call by name: leave it out and set "
            "train.gradient_checkpointing=true"
        )
    if launch.strategy == "zero" and importlib.util.find_spec("deepspeed") is None:
        yield f"{launch.name} needs DeepSpeed, which is not installed: `pip install 'draftsmith[deepspeed]'`"
    if launch.strategy in ("fsdp", "zero") and args.save_only_model:
        yield (
            f"key `train.save_only_model`: with {launch.name} a checkpoint without the optimiser's state cannot be "
            "gone on from: leave it out"
        )
    split = [name for name in SPLIT_MODELS if int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")) > 1]
    if split:
        yield (
            f"accelerate's parallelism_config asks for {split[0].lower()}_size above 1: drafters are trained "
            "data-parallel only, so leave it out; a target that does not fit is split by data.features.sharded=true"
        )


def _of_the_target(recipe: Recipe, launch: Launch) -> Iterator[str]:
    features, kind = recipe.data.features, recipe.drafter.kind
    needs = load_drafter_class(kind).whole_target_needed
    if recipe.target.quantization is not None and needs is not None:
        yield f"key `target.quantization`: not with drafter.kind `{kind}`, as {needs}: leave it out"
    if not features.sharded:
        return
    key = "key `data.features.sharded`"
    if features.source == "offline":
        yield f"{key}: with data.features.source=offline no process holds the target's layers: leave it out"
    if launch.processes < 2:
        yield f"{key}: the target is split among processes and there is one: launch several, or leave it out"
    if recipe.target.quantization is not None:
        yield f"{key}: bitsandbytes' weights cannot be split: leave it out, or target.quantization"
    if needs is not None:
        yield f"{key}: not with drafter.kind `{kind}`, as {needs}: leave it out"


def _of_the_drafter(recipe: Recipe, launch: Launch) -> Iterator[str]:
    kind = recipe.drafter.kind
    obstacle = load_drafter_class(kind).split_obstacle(recipe.drafter.options)
    if launch.splits_weights and obstacle is not None:
        yield (
            f"drafter.kind `{kind}` cannot be trained with {launch.name}, as {obstacle}: launch with "
            "recipes/accelerate/multi_gpu.yaml or zero2.yaml, or leave out what is in the way"
        )
