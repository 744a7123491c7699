"""Group-wise training (ParallelSpec 4.1): an input token and its K masks are a group; groups never see each other.

Read `alignment` (which label belongs to which row), `attention` (the mathematics, three backends) and `causal` (the
kernels below it), `rows` (which rows are computed, and where they lie) and `documents` (of packed rows), `layers`
(decoder layers that attend so), `context` (blocks of rows before a context). May import `recipes` and the files of
`models`.
"""
