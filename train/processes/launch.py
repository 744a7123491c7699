"""What the launcher started: one process, or several under DDP, FSDP or DeepSpeed's ZeRO.

`accelerate launch` and `torchrun` tell it by the environment; `train.deepspeed` and `train.fsdp` of a recipe are the
Trainer's own way to ask for the same.
"""

import atexit
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import distributed
from transformers import TrainingArguments

from draftsmith.recipes.errors import UserError

ZERO_STAGE_BY_DEFAULT = 2  # accelerate's
Strategy = Literal["single", "ddp", "fsdp", "zero", "megatron"]


@dataclass(frozen=True)
class Launch:
    """strategy: how the drafter's weights are held; version: of FSDP, or ZeRO's stage; processes: of all machines."""

    strategy: Strategy
    processes: int = 1
    version: int = 0

    @property
    def name(self) -> str:
        """As people call it: `FSDP2`, `ZeRO-3`."""
        words = {"single": "one process", "ddp": "DDP", "megatron": "Megatron-LM"}
        return words.get(self.strategy) or f"{'FSDP' if self.strategy == 'fsdp' else 'ZeRO-'}{self.version}"

    @property
    def splits_weights(self) -> bool:
        """Whether no process holds the drafter's weights whole."""
        return self.strategy == "fsdp" or (self.strategy == "zero" and self.version == 3)


def launch_of(args: TrainingArguments) -> Launch:
    """What these arguments and the environment ask for.

    Raises:
        UserError: A DeepSpeed configuration cannot be read.
    """
    processes = args.world_size
    if args.deepspeed or _is_on("ACCELERATE_USE_DEEPSPEED"):
        return Launch("zero", processes, _zero_stage(args))
    if args.fsdp:
        return Launch("fsdp", processes, int(args.fsdp_config.get("version", 2)))
    if _is_on("ACCELERATE_USE_FSDP"):
        return Launch("fsdp", processes, int(os.environ.get("FSDP_VERSION", "1")))
    if _is_on("ACCELERATE_USE_MEGATRON_LM"):
        return Launch("megatron", processes)
    return Launch("ddp" if processes > 1 else "single", processes)


@functools.cache
def leave_at_exit() -> None:
    """End gloo's group before the interpreter ends; to be called where `TrainingArguments` has made it.

    A thread of gloo that lets go of a tensor after that asks for the interpreter's lock and aborts the process
    (pytorch #179291), whatever it was to end with. NCCL's end, which may wait for the others, is left to torch.
    """
    atexit.register(_leave)


def _leave() -> None:
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


def _zero_stage(args: TrainingArguments) -> int:
    config: Any = args.deepspeed or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if not config or config == "none":
        return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", ZERO_STAGE_BY_DEFAULT))
    if not isinstance(config, dict):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"the DeepSpeed configuration {config} cannot be read ({error}): correct it") from None
    return int(config.get("zero_optimization", {}).get("stage", 0))
