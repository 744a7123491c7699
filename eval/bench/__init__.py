"""Measuring: every question through every method in one process, beside the autoregressive baseline.

Read `measured_methods` (what is compared), `spec_bench`, then `records` (what it writes, and when a speedup may be
told) and `bandwidth` (how good the baseline is); `theory` is measured off the clock, as is `traced`, a few answers
round by round; `replay` drafts through known answers. May import `eval.methods` and what is before it.
"""
