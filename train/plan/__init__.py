"""`draftsmith plan`: what training will need, from configs alone.

Read `plan`, then `estimate` (one step in closed form).
May import all of `train`.
"""
