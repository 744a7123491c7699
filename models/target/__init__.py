"""The target: loaded once, frozen, tapped for features, with the KV cache that draft trees need.

Read `loading`, `features` (what drafters read of it), then `tree_cache`. `adapter` is about drafters that change their
target, `gguf_file` about targets in that format. May import `recipes` and the files of `models`.
"""
