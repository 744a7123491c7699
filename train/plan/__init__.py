"""`draftsmith plan`: what training will need, from configs alone.

Read `plan`, then `step_cost` (one step on tensors without values) and `batches`; `data_scaling` says what more data is
worth; `table` shows it all. May import all of `train` but the embedded target.
"""
