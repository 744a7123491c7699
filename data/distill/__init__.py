"""Self-distillation: the target answers every turn itself; whatever is killed, nothing is lost or asked twice.

Read `distill` (who is asked what when), `ledger` (what became of each conversation, on disk), then
`token_dataset`, which training reads. May import `data.engines` and what is before it.
"""
