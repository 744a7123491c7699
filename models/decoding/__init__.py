"""Drafters in decoding: queues, KV caches, trees that grow.

Read `protocols` (what a decoder is), `cached` (the kinds made of layers), `blocks` (those before a context),
`kv_cache`. May import `models.groups` and the files of `models`.
"""
