"""Self-distillation: the target answers every turn itself; a killed process loses no answer and repeats none.

Read `distill` (the order of requests), `ledger` (the state of each conversation, on disk), then `token_dataset`, which
training reads. `limits` are the target's, `settings` those that a folder's answers depend on. May import `data.engines`
and the folders before it.
"""
