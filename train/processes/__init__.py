"""Training in several processes: DDP, FSDP2 and DeepSpeed's ZeRO, and the frozen target beside them.

Read `launch` (what was started), `refusals` (what of it cannot work), then `frozen_target` and `whole_weights`;
`sharding` is FSDP2 where accelerate leaves it out, `lost_process` what is said when a neighbour is gone.
"""
