"""Draft trees and their verification: pure functions of tokens, parents, p and q; no model, no cache.

Read `verify`; then `path_lookup` (candidates from the earlier text). `enumeration` proves verification exact by running
it for all random outcomes. Of `models` it imports its own files and `decoding`.
"""
