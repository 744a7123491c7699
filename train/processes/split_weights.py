"""Setup of FSDP2 and ZeRO, which split the drafter among processes, and gathering of its whole weights.

Whole weights are written when training ends, and read from a checkpoint of its last step.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from draftsmith.train.processes.launch import Launch

# What FSDP2 writes into a checkpoint: a folder of torch's distributed format, or one file.
IN_PARTS, IN_ONE = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"
# Which transformers computes from the drafter's hidden size; the last two are read at stage 3 alone.
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


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


def set_up_zero(trainer: Any) -> None:
    """Make DeepSpeed's buckets as large as the drafter needs, instead of its default of 2 GB of fp32.

    Sizes that DeepSpeed's configuration sets are kept.
    """
    zero = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config["zero_optimization"]
    for key in BUCKETS if zero["stage"] == 3 else BUCKETS[:1]:
        zero.setdefault(key, "auto")


def whole_weights(trainer: Any, launch: Launch) -> dict[str, Tensor] | None:
    """Return the whole weights of FSDP or ZeRO by name, on the CPU, in the optimiser's precision; otherwise None.

    All processes must call it; only the first uses the result.
    """
    if launch.strategy not in ("fsdp", "zero"):
        return None
    if isinstance(trainer.model, FSDPModule):
        state: dict[str, Tensor] = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        return {name: (v.full_tensor() if isinstance(v, DTensor) else v).cpu() for name, v in state.items()}
    if launch.strategy == "zero" and trainer.deepspeed is not None:
        return _deepspeed_weights(trainer.accelerator.unwrap_model(trainer.model))
    return trainer.model.state_dict()  # not split yet


@torch.no_grad()
def _deepspeed_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return DeepSpeed's fp32 copies of the parameters: the model's may be in bf16, or split over processes."""
    from deepspeed import zero  # an optional dependency
    from deepspeed.utils import safe_get_full_fp32_param

    whole = {}
    for name, parameter in model.named_parameters():
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        with zero.GatheredParameters([parameter]):
            whole[name] = (parameter.detach() if master is None else master).cpu().clone()
    return {
        name: whole[name] if name in whole else tensor.detach().cpu().clone()
        for name, tensor in model.state_dict().items()
    }


def load_whole_weights(model: nn.Module, checkpoint: Path, launch: Launch) -> None:
    """Load a checkpoint that FSDP2 or ZeRO wrote in parts into a drafter whose weights are not split."""
    state = model.state_dict()
    if launch.strategy == "zero":
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state |= get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    elif (checkpoint / IN_ONE).exists():
        state |= torch.load(checkpoint / IN_ONE, weights_only=True)
    else:
        distributed_checkpoint.load({"model": state}, checkpoint_id=checkpoint / IN_PARTS)
    model.load_state_dict(state)
