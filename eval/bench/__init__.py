"""Measurement: every question with every method in one process, together with the autoregressive baseline.

Read `measured_methods` (the methods of a recipe), `spec_bench` (the harness), then `records` (its output, and when
times may be compared) and `bandwidth` (how fast the baseline could be). `replay` replays drafting on known answers;
`divergence` tells a tie from a bug where two answers differ. May import `eval.methods` and the folders before it.
"""
