"""FSDP2 and ZeRO of the drafter as accelerate sets them up, in three points otherwise.

On a CPU accelerate forgets that FSDP was asked for and runs DDP. In half precision it would hand the loss and the
counts of correct tokens over in bf16, where 257 labels are 256: autocast does the rounding instead, as everywhere else,
and gradients are added up in fp32. And
DeepSpeed's buckets are sized by the drafter, where its own default is 2 GB of fp32 whatever is trained.
"""

from typing import Any

from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy

# Which transformers computes from the drafter's hidden size; the last two are read at stage 3 alone.
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def set_up_fsdp(trainer: Any) -> None:
    """Of a `transformers.Trainer` that has just made its accelerator, for a launch under FSDP2."""
    state = trainer.accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**(trainer.args.fsdp_plugin_args or {}))
        state.distributed_type = DistributedType.FSDP
        trainer.is_fsdp_enabled = True
    state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()


def set_up_zero(trainer: Any) -> None:
    """The same for a launch under DeepSpeed; what its configuration says itself holds."""
    zero = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config["zero_optimization"]
    for key in BUCKETS if zero["stage"] == 3 else BUCKETS[:1]:
        zero.setdefault(key, "auto")
