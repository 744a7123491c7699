"""Group-wise training (ParallelSpec 4.1): an input token and its K masks are a group; groups never see each other.

Read `layout` (who attends to whom, which rows are computed, and their labels) and `attention` (the mathematics, three
backends); `layers` builds decoder layers that attend so. May import `recipes` and the files of `models`.
"""
