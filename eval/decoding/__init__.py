"""The loop that every method, and the baseline, runs through.

Read `generate` (`decode_round`, and the answer made of rounds), `method` (the calls that a round makes to its method),
`session` (the target with its KV cache). `stop_strings` end an answer. May import `eval.trees`.
"""
