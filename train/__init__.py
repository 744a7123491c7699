"""Training: `train_parallel.py` trains a recipe's drafter.

Read `drafter` (the stage, the Trainer), `features` (what the target says, from disk),
`processes` (several of them), `plan` (what it will cost). Imports `data` and `models`.
"""
