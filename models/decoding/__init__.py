"""Models in decoding: KV caches, queues, trees that grow.

Read `kv_cache` (keys and values, which are kept, and what a row sees), `forward` (a causal language model over it),
`recurrent` (states of recurrent layers), `cached_layers` (a drafter's layers over it), `decoders` (drafters in
decoding). May import `models.groups`, `models.target` and the files of `models`.
"""
