"""Decoding with drafts, and its honest measurement.

Read `trees` (draft trees and their verification), `decoding` (the decoding loop), `methods` (ways of drafting), `bench`
(the measurement), `report` (tables and report) and `engines` (load tests in vLLM, SGLang and llama.cpp).
`speculative_decoder` is decoding for scripts. Imports all the others.
"""
