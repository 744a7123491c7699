"""Training in several processes: DDP and FSDP2, with the frozen target.

Read `launch` (recognising and checking the launch), then `frozen_target` and `split_weights`.
"""
