"""`draftsmith plan`: what training will need, from configs alone.

Read `plan`, then `step_cost` (one step on tensors without values) and `batches`; `data_scaling` says what more data is
worth; `table` shows it all; `out_of_memory` answers an allocation that failed. May import all of `train` but the
embedded target.
"""
