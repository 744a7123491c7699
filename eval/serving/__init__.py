"""Drafters in a real serving engine: the same questions with and without drafts, one and many at a time.

Read `endpoint` (a client of a server and what it counts of its drafts), then `asking` (who is asked what when, and the
figures of it). `own` has our decoder's figures for the same prompts, `cpu_sampling` corrects vLLM's sampling on a CPU,
`result` is what is kept and shown. May import `eval.artifacts` and what is before it.
"""
