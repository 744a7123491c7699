"""The target: loaded once, frozen, tapped for features.

Read `loading`, then `features` (what drafters read of it); `gguf_file` and `quantized` are about targets in those
formats. May import `recipes` and the files of `models`.
"""
