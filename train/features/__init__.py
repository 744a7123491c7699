"""What drafters read of the target, written to disk before training.

`write` is the stage, `cache` the format and what the trainer reads. May import `train.processes`.
"""
