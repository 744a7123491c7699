"""FSDP2 of the drafter as accelerate sets it up, in two points otherwise.

On a CPU accelerate forgets that FSDP was asked for and runs DDP. In half precision it would hand the loss and the
counts of correct tokens over in bf16, where 257 labels are 256: autocast does the rounding instead, as everywhere else,
and gradients are added up in fp32.
"""

from typing import Any

from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy


def set_up_fsdp(trainer: Any) -> None:
    """Of a `transformers.Trainer` that has just made its accelerator, for a launch under FSDP2."""
    state = trainer.accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**(trainer.args.fsdp_plugin_args or {}))
        state.distributed_type = DistributedType.FSDP
        trainer.is_fsdp_enabled = True
    state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
