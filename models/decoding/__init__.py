"""Drafters in decoding: queues, KV caches, trees that grow.

Read `decoders` (what one is, and the kinds made of layers), `blocks` (those before a context). May import
`models.groups` and the files of `models`.
"""
