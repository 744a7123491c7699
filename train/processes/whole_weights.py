"""The drafter's weights in one piece, where a launch holds them in parts or rounded: for the file that training ends
with, and from a checkpoint of such a launch.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from draftsmith.train.processes.launch import Launch
from draftsmith.train.processes.layouts import OF_FSDP


def whole_weights(trainer: Any, launch: Launch) -> dict[str, Tensor] | None:
    """By name, on the CPU, in the precision that the optimiser holds them in; None: the Trainer saves them as they are.

    All processes must ask. What the others than the first get is of no use.
    """
    if launch.strategy not in ("fsdp", "zero"):
        return None
    if isinstance(trainer.model, FSDPModule):
        state: dict[str, Tensor] = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        return {name: (v.full_tensor() if isinstance(v, DTensor) else v).cpu() for name, v in state.items()}
    if launch.strategy == "zero" and trainer.deepspeed is not None:
        return _of_deepspeed(trainer.accelerator.unwrap_model(trainer.model))
    return trainer.model.state_dict()  # not split yet


@torch.no_grad()
def _of_deepspeed(model: nn.Module) -> dict[str, Tensor]:
    """DeepSpeed's own copies are in fp32, where what the model computes with may be in bf16, or one part of several."""
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
    """Into a drafter that is not split, from a checkpoint that this launch wrote in parts."""
    state = model.state_dict()
    if launch.strategy == "zero":
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state |= get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    else:
        in_parts, in_one = (checkpoint / name for name in OF_FSDP)
        if in_one.exists():
            state |= torch.load(in_one, weights_only=True)
        else:
            distributed_checkpoint.load({"model": state}, checkpoint_id=in_parts)
    model.load_state_dict(state)
