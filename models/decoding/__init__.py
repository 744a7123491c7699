"""Drafters in decoding: queues, KV caches, trees that grow.

Read `decoders`: what one is, and the kinds made of layers. May import `models.groups` and the files of `models`.
"""
