"""What watches over a training while it runs.

Read `step_guard` first: it looks at every step's loss and gradient, with `suspect_batch` for what it writes down. May
import `train.batches` and `train.features`.
"""
