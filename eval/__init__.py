"""Decoding with draft tokens, and measurement of its speed.

Read `trees` (draft trees and their verification), `decoding` (the decoding loop), `methods` (ways of drafting), `bench`
(the measurement), `report` (tables and report) and `engines` (load tests in vLLM, SGLang and llama.cpp).
`speculative_decoder` is a class for decoding in scripts. May import every package but `serve` and `cli`.
"""
