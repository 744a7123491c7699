"""Conversations and questions as they come in: files, Hub datasets, those that ship; read, filtered, mixed.

Read `conversation` (the dataclasses), `records` and `parsing` (one source), `mixture` (several, with what is left out
and why: `filters`, `contamination`, `counts`); `questions` reads what `eval` asks, of which `spec_bench` is fetched.
"""
