"""The loop that every method, and the baseline, runs through.

Read `loop` (the target with its cache, and the rounds), `method` (what it asks of a method), `compiled_session` (the
same in compiled graphs). May import `eval.trees`.
"""
