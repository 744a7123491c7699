"""Load tests of drafters in other engines.

Read `endpoint` (client of an engine's server, and its counters of drafts), then `load_test` (sends all questions at a
given concurrency, and computes, stores and prints the figures); `llama_server` starts llama.cpp's. May import
`eval.bench` and the folders before it.
"""
