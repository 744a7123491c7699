"""Drafting methods, one file each: `drafter` uses a trained drafter, the others need no training.

A file's name is the method's `eval.methods[].kind`. To add a method, add a file with an attribute `METHOD`, which
`registry` finds. May import `eval.decoding` and the folders before it.
"""
