"""Draft trees and their verification: pure functions of tokens, parents, p and q; no model, no cache.

Read `tree`, `verify`; then `builders` (trees from one forward), `growers` (level by level), `path_lookup` (what the
text adds to them). `device_tree`, `path_pool` and `verify_at_once` do the same on a GPU without waiting for it.
`enumeration` proves both ways to verify exact. Of `models` it imports the decoders' protocols, and no drafter.
"""
