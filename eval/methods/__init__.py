"""Ways of proposing tokens, one file each: `drafter` for what was trained, the others need no training.

A new one is one more file with an attribute `METHOD`; its name is `eval.methods[].kind`. Read `registry` for how they
are found. May import `eval.decoding` and what is before it.
"""
