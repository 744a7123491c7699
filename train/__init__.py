"""Training: `train_parallel.py` trains a recipe's drafter.

Read `drafter` (the stage, the Trainer), `batches` (rows to tensors), `features` (what the target says, from disk),
`plan` (what it will cost). Imports `data` and `models`.
"""
