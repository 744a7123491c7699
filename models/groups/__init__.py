"""Group-wise training (ParallelSpec 4.1): an input token and its K masks are a group; groups never see each other.

Read `alignment` (which label belongs to which row), `attention` (the mathematics, three backends) and `causal` (the
kernels below it), `rows` (which rows are computed, and where they lie) and `documents` (of packed rows), `layers`
(decoder layers of the target's kind that attend so). May import `recipes` and the files of `models`.
"""
