"""Measuring: every question through every method in one process, beside the autoregressive baseline.

Read `arms` (what is compared), `spec_bench`, `records` (what it writes), then `fair_clock` (when a speedup may be
told) and `bandwidth` (how good the baseline is); `overlap` and `operations` are measured off the clock, as is `traced`,
a few answers round by round; `replay` needs no target. May import `eval.methods` and what is before it.
"""
