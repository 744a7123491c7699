"""The target p, the drafters q, and how both compute.

Read `drafters` (one file a kind) with `base` (what they are made of), then `groups` (group-wise attention, which
training runs) and `decoding` (what drafting runs); `target` loads and taps the model that is drafted for. `loss` has
every drafter's loss. Imports the root package and `recipes`, nothing of `data`, `train` or `eval`.
"""
