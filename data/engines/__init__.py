"""Who answers prompts: the target in this process, vLLM, or any number of OpenAI-compatible servers.

Read `engine` (the seam: submit, collect), then one of the `*_engine` files; an engine is one of these. `openai_engine`
says what happens when a server dies; `vllm_engine` starts a server and asks it the same way. May import `data.tokens`
and what is before it.
"""
