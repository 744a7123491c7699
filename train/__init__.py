"""Training: `train_parallel.py` trains a recipe's drafter, `train_target.py` the embedded target.

Read `drafter` (the stage, the Trainer), `batches` (rows to tensors), `features` (what the target says, computed or from
disk), `plan` (what it will cost). Imports `data` and `models`.
"""
