"""Drafters in decoding: queues, KV caches, trees that grow.

Read `protocols` (what a decoder is), `cached` (the kinds made of layers), `blocks` (those before a context), `kv_cache`
(the target's and the drafters'). May import `models.groups` and the files of `models`.
"""
