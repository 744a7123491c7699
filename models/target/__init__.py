"""The target: loaded once, frozen, tapped for features.

Read `loading`, then `features` (what drafters read of it). `adapter` is about drafters that change their target,
`gguf_file` about targets in that format. May import `recipes` and the files of `models`.
"""
