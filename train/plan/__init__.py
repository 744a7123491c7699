"""`draftsmith plan`: what training will need, from configs alone.

Read `plan`, then `fake_step` (one step on tensors without values); `out_of_memory` answers an allocation that failed.
May import all of `train`.
"""
