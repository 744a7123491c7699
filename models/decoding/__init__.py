"""Drafters at work on a sequence: queues, KV caches, trees that grow.

Read `protocols` (what a decoder is), `cached` (the two kinds made of layers), `blocks` (those before a context),
`markov` (one forward, then paths), `kv_cache`; `static_layers` for compiled
graphs, `token_columns` for draft vocabularies, `transfers` between host and device. May import `models.groups` and the
files of `models`.
"""
