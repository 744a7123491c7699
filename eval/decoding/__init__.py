"""The loop that every method, and the baseline, runs through.

Read `generate` (the rounds), `method` (the calls that a round makes to its method), `session` (the target with its KV
cache), `compiled_session` (the same in compiled graphs). May import `eval.trees`.
"""
