"""`draftsmith plan`: what training will need, from configs alone.

Read `plan`, then `estimate` (one step in closed form); `out_of_memory` answers an allocation that failed.
May import all of `train`.
"""
