"""Conversations and questions: read from files, Hub datasets or the package, deduplicated and mixed.

Read `files` (the records of a file), `record_reader` (a record as a `conversation`, by `turns`), `distilled`
(answers that a target gave, as files), `mixture` (several sources, what is left out and why); `questions` reads the
questions that `eval` asks, whose sets are in `question_sets`, and finds conversations that repeat them.
"""
