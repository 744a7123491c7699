"""Drafters in a real serving engine: the same questions with and without drafts, one and many at a time.

Read `endpoint` (a client of a server and what it counts of its drafts), then `asking` (who is asked what when, the
figures of it, and how they are kept and shown). `cpu_sampling` corrects vLLM's sampling on a CPU. And our own server:
`server`, with what clients ask in `requests` and what keeps strangers out in `protection`. May import `eval.bench` and
what is before it.
"""
