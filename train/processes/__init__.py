"""Training in several processes: DDP, FSDP2 and DeepSpeed's ZeRO, and the frozen target beside them.

Read `launch` (what was started, and what of it cannot work), then `frozen_target` and `split_weights`.
"""
