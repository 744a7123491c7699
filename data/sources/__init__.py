"""Conversations and questions as they come in: files, Hub datasets, those that ship; read, filtered, mixed.

Read `files` (the records of a file), `conversation` (those of one source, and what they say), `mixture` (several
sources, what is left out and why); `questions` reads what `eval` asks, and finds conversations that repeat it.
"""
