"""Load tests of drafters in other engines, and our own server.

Load tests: read `endpoint` (client of an engine's server, and its counters of drafts), then `load_test` (sends all
questions at a given concurrency, and computes, stores and prints the figures); `llama_server` starts llama.cpp's. Our
server: `worker` (the answers), `api` (OpenAI's API over them), `server` (the port), with the clients' requests in
`requests` and access control in `protection`. May import `eval.bench` and the folders before it.
"""
