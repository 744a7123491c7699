"""Conversations about the machine's Python standard library: the embedded default, which needs no download.

Read `items` (what `ast` finds), `phrasing` (questions and answers about it), `conversations`; `questions` made
`embedded.jsonl`, the embedded question set. Imports nothing else of draftsmith.
"""
