"""Draft trees and their verification: pure functions of tokens, parents, p and q; no model, no cache.

Read `tree`, `verify`; then `builders` (from a drafter's logits to a tree), `adaptive` (how much of it to verify),
`path_lookup` (what the text adds to it). `enumeration` proves verification exact, by running it through all that chance
can do. Of `models` it imports the decoders' protocols, and no drafter.
"""
