"""Drafters in a real serving engine: the same questions with and without drafts, one and many at a time.

Read `asking` (who is asked what when), `counts` (what the engine counts of its drafts), `figures`; an engine is
`offline` (vLLM in this process) or `endpoint` (a server). `own` has our decoder's figures for the same prompts,
`cpu_sampling` corrects vLLM's sampling on a CPU, `result` is what is kept and shown. May import `eval.kept` and
what is before it.
"""
