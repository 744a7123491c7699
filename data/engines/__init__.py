"""Engines that answer prompts: the target in this process, vLLM, or any number of OpenAI-compatible servers.

Read `engine` (the interface: submit, collect), then one of the `*_engine` files. `openai_engine` handles servers that
die, `openai_answers` checks their responses; `vllm_engine` starts such a server. May import `data.tokens`, the folders
before it, and `models`.
"""
