"""The loop that every method, and the baseline, runs through.

Read `loop` (with the record that it fills in), `method` (what it asks of a method), `session` (the target and its
cache), and `compiled_session` (the same in compiled graphs). May import `eval.trees`.
"""
