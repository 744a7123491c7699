"""Who answers prompts: the target in this process, vLLM, or any number of OpenAI-compatible servers.

Read `engine` (the seam: submit, collect), then one of the `*_engine` files; an engine is one of these. `servers` says
what happens when a server dies; `pool` runs one copy a device. May import `data.tokens` and what is before it.
"""
