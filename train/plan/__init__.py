"""`draftsmith plan`: what training will need, from configs alone.

Read `plan`, then `estimate` (what a training keeps, and a step's FLOPs) and `measure` (a step that is run).
May import all of `train`.
"""
