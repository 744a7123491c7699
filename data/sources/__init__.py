"""Conversations and questions as they come in: files, Hub datasets, those that ship; read, filtered, mixed.

Read `records` (of one source), `conversation` (what a record says), `mixture` (several sources, what is left out and
why); `questions` reads what `eval` asks, and finds conversations that repeat it.
"""
