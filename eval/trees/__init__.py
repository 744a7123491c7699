"""Draft trees and their verification: pure functions of tokens, parents, p and q; no model, no cache.

Read `tree`, `verify`; then `builders` (trees from one forward), `growers` (level by level). `enumeration` proves
`verify` exact. Of `models` it imports the decoders' protocols, and no drafter.
"""
