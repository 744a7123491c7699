"""`draftsmith plan`: what training will need, from configs alone.

Read `plan`, then `step_cost` (one step on tensors without values) and `batches`; `table` shows it. May import all of
`train` but the embedded target.
"""
