"""What drafters read of the target: computed in the training step (`online`), or written to disk before.

Offline: `write` is the stage, `engine` and `vllm_engine` compute, `cache` is the format, `offline` opens the right one.
May import `train.batches`.
"""
