"""Conversations and questions as they come in: files, Hub datasets, those that ship; read, filtered, mixed.

Read `files` (the records of a file), `record_reader` (a record as a conversation), `mixture` (several
sources, what is left out and why); `questions` reads what `eval` asks, and finds conversations that repeat it.
"""
