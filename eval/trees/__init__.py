"""Draft trees and their verification: pure functions of tokens, parents, p and q; no model, no cache.

Read `verify`; then `adaptive` (how much of a tree to verify), `path_lookup` (what the text adds to it). `enumeration`
proves verification exact, by running it through all that chance can do. Of `models` it imports `decoding`, no drafter.
"""
