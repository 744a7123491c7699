"""Training in several processes: DDP, FSDP2 and DeepSpeed's ZeRO, with the frozen target.

Read `launch` (recognising and checking the launch), then `frozen_target` and `split_weights`.
"""
