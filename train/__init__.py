"""Training: `train_parallel.py` trains a recipe's drafter.

Read `drafter` (the stage, the Trainer), `features` (the target's hidden states from disk or from servers), `processes`
(DDP), `plan` (memory, disk and time that a training will need). Imports `data` and `models`.
"""
