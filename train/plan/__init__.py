"""`draftsmith plan`: what training will need, from configs alone.

Read `plan`, then `estimate` (memory between steps, and a step's FLOPs) and `measure` (runs a few steps).
May import all of `train`.
"""
