"""Setup of FSDP2, which splits the drafter among processes, and gathering of its whole weights.

Whole weights are written when training ends, and read from a checkpoint of its last step.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from draftsmith.train.processes.launch import Launch

# What FSDP2 writes into a checkpoint: a folder of torch's distributed format, or one file.
IN_PARTS, IN_ONE = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"


def set_up_fsdp(trainer: Any) -> None:
    """Complete accelerate's setup of FSDP2, for a `transformers.Trainer` that has just created its accelerator.

    On a CPU accelerate ignores FSDP and runs DDP. In half precision it would return the loss and the counts of correct
    tokens in bf16, where 257 labels become 256: here autocast rounds instead, as everywhere else, and gradients are
    summed in fp32.
    """
    state = trainer.accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**(trainer.args.fsdp_plugin_args or {}))
        state.distributed_type = DistributedType.FSDP
        trainer.is_fsdp_enabled = True
    state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()


def whole_weights(trainer: Any, launch: Launch) -> dict[str, Tensor] | None:
    """Return the whole weights of FSDP2 by name, on the CPU, in the optimiser's precision; otherwise None.

    All processes must call it; only the first uses the result.
    """
    if launch.strategy != "FSDP2":
        return None
    state: dict[str, Tensor] = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    # Restored from a checkpoint of the last step, they are not split.
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).cpu() for name, v in state.items()}


def load_whole_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint that FSDP2 wrote into a drafter whose weights are not split."""
    state = model.state_dict()
    if (checkpoint / IN_ONE).exists():
        state |= torch.load(checkpoint / IN_ONE, weights_only=True)
    else:
        distributed_checkpoint.load({"model": state}, checkpoint_id=checkpoint / IN_PARTS)
    model.load_state_dict(state)
