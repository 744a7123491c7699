"""The decoding loop of all methods and of the autoregressive baseline.

Read `generate` (`decode_round`, and the answer made of rounds), `method` (the interface of drafting methods), `session`
(the target with its KV cache). `stop_strings` finds the strings that end an answer. May import `eval.trees`.
"""
